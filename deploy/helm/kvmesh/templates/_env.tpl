{{/* Settings as environment variables. Every service reads KVMESH_<SERVICE>_<NAME>, with __ between nested names. */}}

{{/* A value as text. Numbers of values files are floats in Helm, and 268435456 must not become 2.68435456e+08. */}}
{{- define "kvmesh.text" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else if kindIs "slice" . -}}
{{- $parts := list -}}
{{- range . }}{{ $parts = append $parts (include "kvmesh.text" .) }}{{ end -}}
{{- join "," $parts -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* Put settings into a dict of variables: into, prefix, settings. */}}
{{- define "kvmesh.flatten" -}}
{{- $into := .into -}}
{{- $prefix := .prefix -}}
{{- range $name, $value := .settings -}}
{{- $variable := printf "%s%s" $prefix (upper $name) -}}
{{- if kindIs "map" $value -}}
{{- include "kvmesh.flatten" (dict "into" $into "prefix" (printf "%s__" $variable) "settings" $value) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $into $variable (include "kvmesh.text" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The `env` of a container.
     root; service: gateway, …; where: what to call it in messages; own: settings that are the chart's; defaults: settings
     that `settings` may override; settings: the user's; extraEnv; fieldEnv: variables of Kubernetes' own form, placed first. */}}
{{- define "kvmesh.env" -}}
{{- $prefix := printf "KVMESH_%s_" (upper .service) -}}
{{- $own := dict -}}
{{- include "kvmesh.flatten" (dict "into" $own "prefix" $prefix "settings" .own) -}}
{{- $user := dict -}}
{{- include "kvmesh.flatten" (dict "into" $user "prefix" $prefix "settings" .settings) -}}
{{- range $name, $value := $user -}}
{{- if hasKey $own $name -}}
{{- fail (printf "%s.settings: %s is set by the chart and follows from its other values" $.where (lower (trimPrefix $prefix $name))) -}}
{{- end -}}
{{- end -}}
{{- $all := dict -}}
{{- include "kvmesh.flatten" (dict "into" $all "prefix" $prefix "settings" .defaults) -}}
{{- $all = mergeOverwrite $all $user $own -}}
{{/* A variable that is there twice is refused by the API server (server-side apply). */}}
{{- $taken := list "POD_NAME" "POD_IP" -}}
{{- range .fieldEnv }}{{ $taken = append $taken .name }}{{ end -}}
{{- range $name, $value := $all }}{{ if ne $value "" }}{{ $taken = append $taken $name }}{{ end }}{{ end -}}
{{- range .extraEnv -}}
{{- if has .name $taken -}}
{{- fail (printf "%s.extraEnv: %s is there already: from the chart, from `settings`, or twice" $.where .name) -}}
{{- end -}}
{{- $taken = append $taken .name -}}
{{- end -}}
- name: POD_NAME
  valueFrom: { fieldRef: { fieldPath: metadata.name } }
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
{{- with .fieldEnv }}
{{ toYaml . }}
{{- end }}
{{- range $name, $value := $all }}
{{- if ne $value "" }}
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Settings that all services share: root. As YAML of a map. */}}
{{- define "kvmesh.sharedSettings" -}}
metrics_listen: {{ include "kvmesh.listen" (dict "root" .root "port" (.metricsPort | default 9090)) | quote }}
mesh_token_file: /etc/kvmesh/mesh/token
{{- if .tlsSettings }}
tls:
  {{- .tlsSettings | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kvmesh.sharedDefaults" -}}
{{- with .root.Values.telemetry -}}
otlp_endpoint: {{ .otlpEndpoint | quote }}
trace_sample_ratio: {{ .sampleRatio }}
log_format: {{ .logs.format }}
log_level: {{ .logs.level }}
{{- end }}
drain_timeout_s: {{ .drainSeconds | default .root.Values.limits.totalSeconds }}
{{- end -}}
