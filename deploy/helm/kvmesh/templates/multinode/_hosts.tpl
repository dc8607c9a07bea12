{{/* An engine whose ranks are on several hosts: a LeaderWorkerSet, a group of pods a replica. */}}

{{/* Its name: root, name. Not the engine's: the controller makes a headless service of this name, in which pods that are not
     ready are found too, and the engine's own service is another. Pods get -<group>-<host>, and labels a digest behind. */}}
{{- define "kvmesh.hostsName" -}}
{{- $name := include "kvmesh.componentName" (dict "root" .root "component" .name) -}}
{{- if gt (len $name) 43 -}}
{{- $name = printf "%s-%s" ($name | trunc 36 | trimSuffix "-") ($name | sha256sum | trunc 6) -}}
{{- end -}}
{{- printf "%s-hosts" $name -}}
{{- end -}}

{{/* What the ranks of a group are told beside an engine's settings, as a YAML list: root, engine. The controller puts LWS_* in
     front of a container's variables. */}}
{{- define "kvmesh.hostsEnv" -}}
- { name: KVMESH_DECODE_TP_HOSTS, value: {{ .engine.multiNode.hosts | int | quote }} }
- { name: KVMESH_DECODE_TP_HOST_RANK, value: $(LWS_WORKER_INDEX) }
- { name: KVMESH_DECODE_TP_LEADER, value: "$(LWS_LEADER_ADDRESS):50056" }
- { name: KVMESH_DECODE_TP_LISTEN, value: {{ include "kvmesh.listen" (dict "root" .root "port" 50056) | quote }} }
{{- end -}}
