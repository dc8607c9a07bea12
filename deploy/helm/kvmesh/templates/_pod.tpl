{{/* What all pods have in common. */}}

{{/* Security of a pod: user of the files, no root, the runtime's seccomp profile. `user` 10001 unless given. */}}
{{- define "kvmesh.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user | default 10001 }}
runAsGroup: {{ .user | default 10001 }}
fsGroup: {{ .user | default 10001 }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "kvmesh.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{/* Begin of a pod's spec: root, component, values (of the service). */}}
{{- define "kvmesh.podHead" -}}
serviceAccountName: {{ include "kvmesh.serviceAccountName" .root | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace | default (include "kvmesh.terminationGrace" .root) }}
securityContext:
  {{- include "kvmesh.podSecurity" . | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- include "kvmesh.spread" . }}
{{- end -}}

{{- define "kvmesh.spread" -}}
{{- $spread := .root.Values.topologySpread -}}
{{- /* Ranks of one engine speak at each layer: never over zones. */ -}}
{{- $zones := ternary "" $spread.zones (dig "engine" "multiNode" "enabled" false (omit . "root")) -}}
{{- if and $spread.enabled (or $zones $spread.nodes) }}
topologySpreadConstraints:
  {{- range $key, $when := dict "topology.kubernetes.io/zone" $zones "kubernetes.io/hostname" $spread.nodes }}
  {{- if $when }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: {{ $when }}
    labelSelector:
      matchLabels:
        {{- include "kvmesh.selectorLabels" $ | nindent 8 }}
    # Of one rollout: pods of the last one are leaving.
    matchLabelKeys: [{{ ternary "controller-revision-hash" "pod-template-hash" ($.stateful | default false) }}]
  {{- end }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* One probe's way to ask: root, port, service ("" = liveness), timeout. The kubelet speaks no TLS to gRPC. */}}
{{- define "kvmesh.ask" -}}
{{- if .tls -}}
exec:
  command: [kvmesh-probe, {{ printf "127.0.0.1:%v" .port | quote }}{{ with .service }}, {{ . }}{{ end }}, --timeout-s, "2"]
{{- else -}}
grpc: { port: {{ .port }}{{ with .service }}, service: {{ . }}{{ end }} }
{{- end }}
timeoutSeconds: 3
{{- end -}}

{{/* startup, liveness and readiness: root, tls, port, ready (health name), startup (health name), startupSeconds. */}}
{{- define "kvmesh.probes" -}}
startupProbe:
  {{- include "kvmesh.ask" (dict "tls" .tls "port" .port "service" .startup) | nindent 2 }}
  periodSeconds: 5
  failureThreshold: {{ div (add (int .startupSeconds) 4) 5 }}
livenessProbe:
  {{- include "kvmesh.ask" (dict "tls" .tls "port" .port "service" "") | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 6
readinessProbe:
  {{- include "kvmesh.ask" (dict "tls" .tls "port" .port "service" .ready) | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 2
{{- end -}}

{{/* Wait before SIGTERM until nobody is sent here any more: root, seconds. */}}
{{- define "kvmesh.preStop" -}}
{{- if gt (int .seconds) 0 }}
lifecycle:
  preStop:
    {{- if include "kvmesh.atLeast" (dict "root" .root "version" "1.30") }}
    sleep: { seconds: {{ int .seconds }} }
    {{- else }}
    exec: { command: [sleep, {{ int .seconds | quote }}] }
    {{- end }}
{{- end }}
{{- end -}}

{{/* Volumes that every service has: root, component (of TLS), tmpSize. */}}
{{- define "kvmesh.volumes" -}}
- name: tmp
  {{- if .tmpOnDisk }}
  emptyDir: { sizeLimit: 8Gi }
  {{- else }}
  emptyDir: { medium: Memory, sizeLimit: 64Mi }
  {{- end }}
- name: mesh
  secret:
    secretName: {{ include "kvmesh.meshSecretName" .root | quote }}
    defaultMode: 0440
    items: [{ key: {{ .root.Values.auth.meshTokenSecret.key | quote }}, path: token }]
{{- end -}}

{{- define "kvmesh.mounts" -}}
- { name: tmp, mountPath: /tmp }
- { name: mesh, mountPath: /etc/kvmesh/mesh, readOnly: true }
{{- end -}}
