{{/* Names, labels and images. Most helpers take a dict with "root" (the chart's $) and what they are about. */}}

{{- define "kvmesh.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of all names: short enough for what is appended to stay below 63 characters. A longer one ends in its digest, so
     that two releases whose names begin alike do not meet. */}}
{{- define "kvmesh.fullname" -}}
{{- $name := include "kvmesh.name" . -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if gt (len $full) 40 -}}
{{- $full = printf "%s-%s" ($full | trunc 33 | trimSuffix "-") ($full | sha256sum | trunc 6) -}}
{{- end -}}
{{- $full | trimSuffix "-" -}}
{{- end -}}

{{/* Name of one component's objects: root, component. */}}
{{- define "kvmesh.componentName" -}}
{{- printf "%s-%s" (include "kvmesh.fullname" .root) .component | trunc 57 | trimSuffix "-" -}}
{{- end -}}

{{/* What selects a component's pods: root, component (gateway, router, redis, or the name of an engine). */}}
{{- define "kvmesh.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvmesh.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end -}}

{{/* What selects all pods of the release: the chart's $. */}}
{{- define "kvmesh.releaseLabels" -}}
app.kubernetes.io/name: {{ include "kvmesh.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Labels of an object: root, component. */}}
{{- define "kvmesh.labels" -}}
{{ include "kvmesh.selectorLabels" . }}
app.kubernetes.io/part-of: kvmesh
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of pods: root, component, values (of the service). No version of the chart: a new one alone rolls nothing. */}}
{{- define "kvmesh.podLabels" -}}
{{- $labels := merge (include "kvmesh.selectorLabels" . | fromYaml) (dict "app.kubernetes.io/part-of" "kvmesh") (.values.podLabels | default dict) .root.Values.commonLabels -}}
{{- toYaml $labels -}}
{{- end -}}

{{/* Metadata of an object: root, component, and name where it is not the component's. */}}
{{- define "kvmesh.metadata" -}}
name: {{ .name | default (include "kvmesh.componentName" .) | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- merge (dict) (.labels | default dict) (include "kvmesh.labels" . | fromYaml) | toYaml | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Image of a service: root, component (name of the image), image (what a service says otherwise), cuda. */}}
{{- define "kvmesh.image" -}}
{{- $own := .image | default dict -}}
{{- $all := .root.Values.image -}}
{{- $registry := $own.registry | default $all.registry -}}
{{- $repository := $own.repository | default $all.repository -}}
{{- $path := printf "%s/%s" $repository ($own.name | default .component) -}}
{{- $tag := $own.tag | default (printf "%s%s" ($all.tag | default .root.Chart.AppVersion) (ternary $all.cudaSuffix "" (.cuda | default false))) -}}
{{- with $registry }}{{ . | trimSuffix "/" }}/{{ end -}}{{ $path }}
{{- if $own.digest }}@{{ $own.digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end -}}

{{- define "kvmesh.pullPolicy" -}}
{{- (.image | default dict).pullPolicy | default .root.Values.image.pullPolicy -}}
{{- end -}}

{{- define "kvmesh.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "kvmesh.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* Full DNS name of a service: root, name. */}}
{{- define "kvmesh.dns" -}}
{{- printf "%s.%s.svc.%s" .name .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{/* Address that all interfaces listen on, with a port: root, port. */}}
{{- define "kvmesh.listen" -}}
{{- ternary "[::]" "0.0.0.0" .root.Values.ipv6 }}:{{ .port -}}
{{- end -}}

{{/* The pod's own address, with a port: root, port. POD_IP comes from the pod's status. */}}
{{- define "kvmesh.podAddress" -}}
{{- ternary "[$(POD_IP)]" "$(POD_IP)" .root.Values.ipv6 }}:{{ .port -}}
{{- end -}}

{{/* Whether the cluster's Kubernetes is at least a version: root, version. "true" or "". */}}
{{- define "kvmesh.atLeast" -}}
{{- if semverCompare (printf ">=%s-0" .version) .root.Capabilities.KubeVersion.Version -}}true{{- end -}}
{{- end -}}

{{/* Seconds that a pod gets to end: the total limit and 30 s more. */}}
{{- define "kvmesh.terminationGrace" -}}
{{- add (int (ceil .Values.limits.totalSeconds)) 30 -}}
{{- end -}}
