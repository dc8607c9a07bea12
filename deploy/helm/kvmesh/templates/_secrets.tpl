{{/* Secrets that the chart makes once and keeps. */}}

{{- define "kvmesh.meshSecretName" -}}
{{- .Values.auth.meshTokenSecret.name | default (printf "%s-mesh" (include "kvmesh.fullname" .)) -}}
{{- end -}}

{{- define "kvmesh.redisSecretName" -}}
{{- .Values.redis.bundled.auth.passwordSecret.name | default (printf "%s-redis" (include "kvmesh.fullname" .)) -}}
{{- end -}}

{{/* A secret's value, base64: that of the cluster, or a new one. The same throughout a rendering: root, name, key. */}}
{{- define "kvmesh.secretOnce" -}}
{{- $made := .root.Values._made | default dict -}}
{{- if not (hasKey $made .name) -}}
{{- $there := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- $value := dig "data" .key "" ($there | default dict) -}}
{{- $_ := set $made .name ($value | default (randAlphaNum 48 | b64enc)) -}}
{{- $_ := set .root.Values "_made" $made -}}
{{- end -}}
{{- get $made .name -}}
{{- end -}}

{{/* Digest of a secret in the cluster, for what is read at start alone: root, name. "" where it cannot be seen. */}}
{{- define "kvmesh.secretDigest" -}}
{{- $there := lookup "v1" "Secret" .root.Release.Namespace .name -}}
{{- if $there -}}{{ $there.data | default dict | toJson | sha256sum | trunc 16 }}{{- end -}}
{{- end -}}
