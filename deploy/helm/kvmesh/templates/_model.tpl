{{/* Where a model's files come from. `model` has the form of the value of that name. */}}

{{/* What a service is told: a known name, or a path below /models. */}}
{{- define "kvmesh.modelSetting" -}}
{{- if eq .model.source.type "packaged" -}}
{{- .model.name -}}
{{- else -}}
/models{{ with .model.source.path }}/{{ trimAll "/" . }}{{ end }}
{{- end -}}
{{- end -}}

{{- define "kvmesh.modelVolumes" -}}
{{- $source := .model.source -}}
{{- if eq $source.type "pvc" }}
- name: model
  persistentVolumeClaim: { claimName: {{ $source.pvc.claimName | quote }}, readOnly: true }
{{- else if eq $source.type "hostPath" }}
- name: model
  hostPath: { path: {{ $source.hostPath.path | quote }}, type: Directory }
{{- else if eq $source.type "oci" }}
- name: model
  image: { reference: {{ $source.oci.reference | quote }}, pullPolicy: {{ $source.oci.pullPolicy }} }
{{- else if eq $source.type "init" }}
- name: model
  emptyDir: { {{ with $source.init.sizeLimit }}sizeLimit: {{ . | quote }}{{ end }} }
{{- end }}
{{- end -}}

{{- define "kvmesh.modelMounts" -}}
{{- $source := .model.source -}}
{{- if ne $source.type "packaged" }}
- { name: model, mountPath: /models, readOnly: true{{ if and (eq $source.type "pvc") $source.pvc.subPath }}, subPath: {{ $source.pvc.subPath | quote }}{{ end }} }
{{- end }}
{{- end -}}

{{/* The init container that fetches the model, if any. */}}
{{- define "kvmesh.modelInit" -}}
{{- $source := .model.source -}}
{{- if eq $source.type "init" }}
- name: model
  image: {{ $source.init.image | quote }}
  imagePullPolicy: {{ $source.init.pullPolicy }}
  {{- with $source.init.command }}
  command: {{ toJson . }}
  {{- end }}
  {{- with $source.init.args }}
  args: {{ toJson . }}
  {{- end }}
  env:
    - { name: HOME, value: /tmp }
    {{- with $source.init.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $source.init.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $source.init.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "kvmesh.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - { name: model, mountPath: /models }
    - { name: tmp, mountPath: /tmp }
{{- end }}
{{- end -}}
