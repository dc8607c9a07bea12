{{/* An engine's pods: the engine and its sidecar, which share one volume of Unix sockets and nothing else. */}}

{{/* An entry of `engines` over engineDefaults, as YAML: root, name. */}}
{{- define "kvmesh.engine" -}}
{{- $entry := get .root.Values.engines .name | default dict -}}
{{- mergeOverwrite (deepCopy .root.Values.engineDefaults) (deepCopy $entry) | toYaml -}}
{{- end -}}

{{/* Names of the engines that are deployed, as a YAML list: the chart's $. */}}
{{- define "kvmesh.engineNames" -}}
{{- $names := list -}}
{{- range $name, $entry := .Values.engines -}}
{{- if (include "kvmesh.engine" (dict "root" $ "name" $name) | fromYaml).enabled -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- end -}}
{{- toYaml $names -}}
{{- end -}}

{{/* Name of an engine's objects: root, name. */}}
{{- define "kvmesh.engine.name" -}}
{{- include "kvmesh.componentName" (dict "root" .root "component" .name) -}}
{{- end -}}

{{/* Service (and image) of an engine: prefill, or decode for the roles decode and unified. */}}
{{- define "kvmesh.engineService" -}}
{{- ternary "prefill" "decode" (eq .engine.role "prefill") -}}
{{- end -}}

{{- define "kvmesh.enginePort" -}}
{{- ternary "50053" "50054" (eq .engine.role "prefill") -}}
{{- end -}}

{{/* The model of an engine, as YAML: root, engine. */}}
{{- define "kvmesh.engineModel" -}}
{{- mergeOverwrite (deepCopy .root.Values.model) (deepCopy (.engine.model | default dict)) | toYaml -}}
{{- end -}}

{{- define "kvmesh.engineHasSidecar" -}}
{{- if and .engine.kvtransfer.enabled (ne .engine.role "unified") (not .engine.multiNode.enabled) -}}true{{- end -}}
{{- end -}}

{{/* Whether the sidecar is an init container that goes on running: the chart's $. "true" or "". */}}
{{- define "kvmesh.nativeSidecar" -}}
{{- $native := toString .Values.kvtransfer.native -}}
{{- if or (eq $native "true") (and (eq $native "auto") (include "kvmesh.atLeast" (dict "root" . "version" "1.29"))) -}}true{{- end -}}
{{- end -}}

{{/* Labels by which policies and people find engines: name, engine. */}}
{{- define "kvmesh.engineLabels" -}}
kvmesh.io/tier: engine
kvmesh.io/role: {{ .engine.role | quote }}
{{- with .engine.revision }}
kvmesh.io/revision: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Targets of the engines of some roles, comma separated: root, roles. */}}
{{- define "kvmesh.engineTargets" -}}
{{- $targets := list -}}
{{- range $name := include "kvmesh.engineNames" .root | fromYamlArray -}}
{{- $engine := include "kvmesh.engine" (dict "root" $.root "name" $name) | fromYaml -}}
{{- if has $engine.role $.roles -}}
{{- $service := include "kvmesh.componentName" (dict "root" $.root "component" $name) -}}
{{- $targets = append $targets (printf "dns:///%s:%s" (include "kvmesh.dns" (dict "root" $.root "name" $service)) (include "kvmesh.enginePort" (dict "engine" $engine))) -}}
{{- end -}}
{{- end -}}
{{- join "," $targets -}}
{{- end -}}

{{/* The pod template of an engine: root, name, and for a host of several: env (further variables of the engine). Every
     host serves health and metrics. */}}
{{- define "kvmesh.enginePodTemplate" -}}
{{- $root := .root -}}
{{- $engine := include "kvmesh.engine" . | fromYaml -}}
{{- $model := include "kvmesh.engineModel" (dict "root" $root "engine" $engine) | fromYaml -}}
{{- $ctx := dict "root" $root "component" .name "engine" $engine "values" $engine "model" $model "member" "engine" "tmpOnDisk" (or (eq $engine.device "cuda") (eq $model.source.type "init")) -}}
{{- $sidecar := include "kvmesh.engineHasSidecar" $ctx -}}
{{- $native := include "kvmesh.nativeSidecar" $root -}}
metadata:
  labels:
    {{- include "kvmesh.podLabels" $ctx | nindent 4 }}
    {{- include "kvmesh.engineLabels" $ctx | nindent 4 }}
  annotations:
    kubectl.kubernetes.io/default-container: engine
    {{- with $engine.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "kvmesh.podHead" $ctx | nindent 2 }}
  {{- $init := include "kvmesh.modelInit" $ctx }}
  {{- if or $init (and $sidecar $native) }}
  initContainers:
    {{- with $init }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if and $sidecar $native }}
    {{- include "kvmesh.sidecarContainer" $ctx | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    {{- include "kvmesh.engineContainer" (merge (dict "moreEnv" .env "sidecar" $sidecar) $ctx) | nindent 4 }}
    {{- if and $sidecar (not $native) }}
    {{- include "kvmesh.sidecarContainer" $ctx | nindent 4 }}
    {{- end }}
  volumes:
    {{- include "kvmesh.volumes" $ctx | nindent 4 }}
    {{- with include "kvmesh.tlsVolumes" $ctx | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "kvmesh.modelVolumes" $ctx | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if $sidecar }}
    - name: kvtransfer
      emptyDir: { medium: Memory, sizeLimit: {{ $root.Values.kvtransfer.socketSizeLimit | quote }} }
    {{- end }}
    {{- if eq $engine.device "cuda" }}
    - name: cache
      emptyDir: {}
    {{- if gt (int $engine.tp) 1 }}
    - name: shm
      emptyDir: { medium: Memory, sizeLimit: 8Gi }
    {{- end }}
    {{- end }}
    {{- with $engine.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Resources of the engine's container, GPUs included: engine. */}}
{{- define "kvmesh.engineResources" -}}
{{- $resources := deepCopy .engine.resources -}}
{{- if eq .engine.device "cuda" -}}
{{- $hosts := ternary (int .engine.multiNode.hosts) 1 .engine.multiNode.enabled -}}
{{- $gpus := int .engine.gpus | default (div (int .engine.tp) $hosts) -}}
{{- $limits := merge (dict .engine.gpuResource $gpus) ($resources.limits | default dict) -}}
{{- $requests := merge (dict .engine.gpuResource $gpus) ($resources.requests | default dict) -}}
{{- $resources = merge (dict "limits" $limits "requests" $requests) $resources -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "kvmesh.engineContainer" -}}
{{- $engine := .engine -}}
{{- $service := include "kvmesh.engineService" . -}}
{{- $port := include "kvmesh.enginePort" . -}}
{{- $cuda := eq $engine.device "cuda" -}}
{{- $where := printf "engines.%s" .component -}}
{{- $shared := include "kvmesh.sharedSettings" (dict "root" .root "tlsSettings" (include "kvmesh.tlsSettings" .)) | fromYaml -}}
{{- $own := merge $shared (dict
      "listen" (include "kvmesh.listen" (dict "root" .root "port" $port))
      "advertise" (include "kvmesh.podAddress" (dict "root" .root "port" $port))
      "role" $engine.role "device" $engine.device "tp" $engine.tp "dtype" $engine.dtype
      "model" (include "kvmesh.modelSetting" .) "served_name" .model.servedName) -}}
{{- if .sidecar }}{{ $_ := set $own "sidecar_socket" "/run/kvtransfer/engine.sock" }}{{ end -}}
{{- if .root.Values.router.enabled -}}
{{- $_ := set $own "routers" (printf "dns:///%s:50052" (include "kvmesh.dns" (dict "root" .root "name" (printf "%s-fleet" (include "kvmesh.componentName" (dict "root" .root "component" "router")))))) -}}
{{- else if eq $engine.role "decode" -}}
{{- $_ := set $own "prefill_workers" (include "kvmesh.engineTargets" (dict "root" .root "roles" (list "prefill"))) -}}
{{- end -}}
{{- $defaults := include "kvmesh.sharedDefaults" (dict "root" .root) | fromYaml -}}
{{- $more := .moreEnv | default list -}}
{{- if and (not $cuda) ((($engine.resources).limits).cpu) (not (hasKey $engine.settings "threads")) -}}
{{/* Otherwise as many threads as the node has CPUs. */}}
{{- $more = append $more (dict "name" (printf "KVMESH_%s_THREADS" (upper $service)) "valueFrom" (dict "resourceFieldRef" (dict "containerName" "engine" "resource" "limits.cpu"))) -}}
{{- end -}}
- name: engine
  image: {{ include "kvmesh.image" (dict "root" .root "component" $service "image" $engine.image "cuda" $cuda) | quote }}
  imagePullPolicy: {{ include "kvmesh.pullPolicy" (dict "root" .root "image" $engine.image) }}
  securityContext:
    {{- include "kvmesh.containerSecurity" . | nindent 4 }}
  env:
    {{- include "kvmesh.env" (dict "root" .root "service" $service "where" $where "own" $own "defaults" $defaults "settings" $engine.settings "fieldEnv" $more "extraEnv" $engine.extraEnv) | nindent 4 }}
    {{- if $cuda }}
    # Kernels that are compiled at run time, and what looks for a home.
    {{- $given := list }}
    {{- range $engine.extraEnv }}{{ $given = append $given .name }}{{ end }}
    {{- range $name, $value := dict "HOME" "/tmp" "TRITON_CACHE_DIR" "/var/cache/kvmesh/triton" "FLASHINFER_WORKSPACE_BASE" "/var/cache/kvmesh" "XDG_CACHE_HOME" "/var/cache/kvmesh" }}
    {{- if not (has $name $given) }}
    - { name: {{ $name }}, value: {{ $value }} }
    {{- end }}
    {{- end }}
    {{- end }}
  ports:
    - { name: grpc, containerPort: {{ $port }} }
    - { name: metrics, containerPort: 9090 }
  {{- include "kvmesh.probes" (dict "root" .root "tls" (include "kvmesh.servesTls" .) "port" $port "ready" "kvmesh.v1.Engine" "startup" "kvmesh.v1.Engine" "startupSeconds" $engine.startupSeconds) | nindent 2 }}
  {{- with include "kvmesh.preStop" (dict "root" .root "seconds" $engine.preStopSeconds) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  resources:
    {{- include "kvmesh.engineResources" . | nindent 4 }}
  volumeMounts:
    {{- include "kvmesh.mounts" . | nindent 4 }}
    {{- with include "kvmesh.tlsMounts" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "kvmesh.modelMounts" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if .sidecar }}
    - { name: kvtransfer, mountPath: /run/kvtransfer }
    {{- end }}
    {{- if $cuda }}
    - { name: cache, mountPath: /var/cache/kvmesh }
    {{- if gt (int $engine.tp) 1 }}
    - { name: shm, mountPath: /dev/shm }
    {{- end }}
    {{- end }}
    {{- with $engine.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "kvmesh.sidecarContainer" -}}
{{- $engine := .engine -}}
{{- $values := .root.Values.kvtransfer -}}
{{- $native := include "kvmesh.nativeSidecar" .root -}}
{{- $port := include "kvmesh.enginePort" . -}}
{{- $tls := include "kvmesh.servesTls" . -}}
{{- $resources := deepCopy $values.resources -}}
{{- if $engine.rdma.enabled -}}
{{- $count := int $engine.rdma.count -}}
{{- $resources = merge (dict
      "limits" (merge (dict $engine.rdma.resource $count) ($resources.limits | default dict))
      "requests" (merge (dict $engine.rdma.resource $count) ($resources.requests | default dict))) $resources -}}
{{- end -}}
{{- $shared := include "kvmesh.sharedSettings" (dict "root" .root "metricsPort" 9091 "tlsSettings" (include "kvmesh.tlsSettings" .)) | fromYaml -}}
{{- $own := merge $shared (dict
      "listen" (include "kvmesh.listen" (dict "root" .root "port" 50055))
      "advertise" (include "kvmesh.podAddress" (dict "root" .root "port" 50055))
      "engine_socket" "/run/kvtransfer/engine.sock"
      "tcp_listen_host" (ternary "::" "0.0.0.0" .root.Values.ipv6)
      "transports" (ternary $engine.rdma.transports $engine.kvtransfer.transports $engine.rdma.enabled)) -}}
{{- if and $engine.rdma.enabled (ne (int $engine.rdma.runAsUser) 10001) -}}
{{/* The engine is another user, of the same group. */}}
{{- $_ := set $own "engine_group" 10001 -}}
{{- end -}}
{{- $defaults := include "kvmesh.sharedDefaults" (dict "root" .root "drainSeconds" 15) | fromYaml -}}
- name: kvtransfer
  image: {{ include "kvmesh.image" (dict "root" .root "component" "kvtransfer" "image" $values.image) | quote }}
  imagePullPolicy: {{ include "kvmesh.pullPolicy" (dict "root" .root "image" $values.image) }}
  {{- if $native }}
  # It starts before the engine and gets SIGTERM only when the engine has ended.
  restartPolicy: Always
  {{- end }}
  securityContext:
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    {{- if $engine.rdma.enabled }}
    {{- if eq (int $engine.rdma.runAsUser) 0 }}
    runAsNonRoot: false
    {{- end }}
    runAsUser: {{ int $engine.rdma.runAsUser }}
    # Pinned memory is what a NIC reads and writes.
    capabilities: { drop: [ALL], add: [IPC_LOCK] }
    {{- else }}
    capabilities: { drop: [ALL] }
    {{- end }}
  env:
    {{- include "kvmesh.env" (dict "root" .root "service" "kvtransfer" "where" "kvtransfer" "own" $own "defaults" $defaults "settings" $values.settings "extraEnv" $values.extraEnv) | nindent 4 }}
  ports:
    - { name: kvtransfer, containerPort: 50055 }
    - { name: metrics-kv, containerPort: 9091 }
  # Its readiness is that an engine has registered, and the engine starts after it.
  {{- include "kvmesh.probes" (dict "root" .root "tls" $tls "port" 50055 "ready" "kvmesh.v1.KvTransfer" "startup" "" "startupSeconds" 60) | nindent 2 }}
  {{- if not $native }}
  lifecycle:
    preStop:
      # Both get SIGTERM at once where the sidecar is an ordinary container: it waits until the engine has gone.
      exec:
        command:
          - sh
          - -c
          - >-
            misses=0; while [ "$misses" -lt 3 ]; do
            if kvmesh-probe 127.0.0.1:{{ $port }} --timeout-s 2; then misses=0; else misses=$((misses + 1)); fi;
            sleep 1; done
  {{- end }}
  {{- with $resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  volumeMounts:
    {{- include "kvmesh.mounts" . | nindent 4 }}
    {{- with include "kvmesh.tlsMounts" . | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    - { name: kvtransfer, mountPath: /run/kvtransfer }
{{- end -}}
