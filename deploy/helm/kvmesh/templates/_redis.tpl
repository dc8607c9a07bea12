{{/* How gateways and routers reach Redis. */}}

{{- define "kvmesh.redisName" -}}
{{- include "kvmesh.componentName" (dict "root" . "component" "redis") -}}
{{- end -}}

{{/* "bundled", "external" or "". */}}
{{- define "kvmesh.redisKind" -}}
{{- if .Values.redis.external.url -}}external{{- else if .Values.redis.bundled.enabled -}}bundled{{- end -}}
{{- end -}}

{{/* Whether Redis holds what must not be lost: "true" or "". */}}
{{- define "kvmesh.redisKeeps" -}}
{{- if or .Values.limits.budgets .Values.auth.keysInRedis -}}true{{- end -}}
{{- end -}}

{{- define "kvmesh.redisPersists" -}}
{{- $enabled := toString .Values.redis.bundled.persistence.enabled -}}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") (include "kvmesh.redisKeeps" .)) -}}true{{- end -}}
{{- end -}}

{{/* Secret and key of the password, as YAML; "" where none is needed. */}}
{{- define "kvmesh.redisPassword" -}}
{{- $kind := include "kvmesh.redisKind" . -}}
{{- if and (eq $kind "bundled") .Values.redis.bundled.auth.enabled -}}
name: {{ include "kvmesh.redisSecretName" . | quote }}
key: {{ .Values.redis.bundled.auth.passwordSecret.key | quote }}
{{- else if and (eq $kind "external") .Values.redis.external.passwordSecret.name -}}
name: {{ .Values.redis.external.passwordSecret.name | quote }}
key: {{ .Values.redis.external.passwordSecret.key | quote }}
{{- end -}}
{{- end -}}

{{/* Secret and key of the authorities, as YAML; "" = the system's, or no TLS. */}}
{{- define "kvmesh.redisCa" -}}
{{- $kind := include "kvmesh.redisKind" . -}}
{{- if and (eq $kind "bundled") .Values.redis.bundled.tls.enabled -}}
name: {{ include "kvmesh.tlsSecretName" (dict "root" . "member" "redis") | quote }}
key: ca.crt
{{- else if and (eq $kind "external") .Values.redis.external.caSecret.name -}}
name: {{ .Values.redis.external.caSecret.name | quote }}
key: {{ .Values.redis.external.caSecret.key | quote }}
{{- end -}}
{{- end -}}

{{/* Settings `redis_*` as YAML: the chart's $. */}}
{{- define "kvmesh.redisSettings" -}}
{{- $kind := include "kvmesh.redisKind" . -}}
{{- if eq $kind "bundled" -}}
redis_url: {{ printf "%s://%s:6379/0" (ternary "rediss" "redis" .Values.redis.bundled.tls.enabled) (include "kvmesh.dns" (dict "root" . "name" (include "kvmesh.redisName" .))) }}
{{- else if eq $kind "external" -}}
redis_url: {{ .Values.redis.external.url | quote }}
redis_cluster: {{ .Values.redis.external.cluster }}
{{- end }}
{{- if include "kvmesh.redisPassword" . }}
redis_password_file: /etc/kvmesh/redis/password
{{- end }}
{{- if include "kvmesh.redisCa" . }}
redis_ca_file: /etc/kvmesh/redis-ca/ca.crt
{{- end }}
{{- end -}}

{{- define "kvmesh.redisVolumes" -}}
{{- with include "kvmesh.redisPassword" . | fromYaml }}
{{- if .name }}
- name: redis-password
  secret: { secretName: {{ .name | quote }}, defaultMode: 0440, items: [{ key: {{ .key | quote }}, path: password }] }
{{- end }}
{{- end }}
{{- with include "kvmesh.redisCa" . | fromYaml }}
{{- if .name }}
- name: redis-ca
  secret: { secretName: {{ .name | quote }}, defaultMode: 0440, items: [{ key: {{ .key | quote }}, path: ca.crt }] }
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvmesh.redisMounts" -}}
{{- if include "kvmesh.redisPassword" . }}
- { name: redis-password, mountPath: /etc/kvmesh/redis, readOnly: true }
{{- end }}
{{- if include "kvmesh.redisCa" . }}
- { name: redis-ca, mountPath: /etc/kvmesh/redis-ca, readOnly: true }
{{- end }}
{{- end -}}

{{/* What makes pods roll when a secret changes that they read at start alone (the others are read again): the chart's $. As
     annotations. A named secret is looked up in the cluster, so that `helm template` has nothing to tell of it. */}}
{{- define "kvmesh.startChecksums" -}}
{{- $password := include "kvmesh.redisPassword" . | fromYaml -}}
{{- $generated := and (eq (include "kvmesh.redisKind" .) "bundled") (not .Values.redis.bundled.auth.passwordSecret.name) -}}
{{- if and $password.name $generated }}
checksum/redis-password: {{ include "kvmesh.secretOnce" (dict "root" $ "name" $password.name "key" $password.key) | sha256sum | trunc 16 | quote }}
{{- else if $password.name }}
{{- with include "kvmesh.secretDigest" (dict "root" $ "name" $password.name) }}
checksum/redis-password: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .Values.redis.external.caSecret.name }}
{{- with include "kvmesh.secretDigest" (dict "root" $ "name" .) }}
checksum/redis-ca: {{ . | quote }}
{{- end }}
{{- end }}
{{- with .Values.cache.secret.name }}
{{- with include "kvmesh.secretDigest" (dict "root" $ "name" .) }}
checksum/cache-secret: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Answers expire within hours or days, what a budget has spent after 400 days or never, and keys when they end. So
     volatile-ttl, which removes what ends soonest, takes answers; allkeys-* would take budgets and keys too. */}}
{{- define "kvmesh.redisPolicy" -}}
{{- $policy := .Values.redis.bundled.maxmemoryPolicy -}}
{{- ternary "volatile-ttl" $policy (eq $policy "auto") -}}
{{- end -}}

{{- define "kvmesh.redisConf" -}}
{{- $redis := .Values.redis.bundled -}}
{{- if $redis.tls.enabled -}}
port 0
tls-port 6379
tls-cert-file /etc/redis-tls/tls.crt
tls-key-file /etc/redis-tls/tls.key
tls-ca-cert-file /etc/redis-tls/ca.crt
tls-auth-clients no
{{- else -}}
port 6379
{{- end }}
bind * -::*
protected-mode {{ ternary "yes" "no" $redis.auth.enabled }}
dir /data
maxmemory {{ $redis.maxmemory }}
maxmemory-policy {{ include "kvmesh.redisPolicy" . }}
# More of a sample finds what ends soonest more surely.
maxmemory-samples 10
save ""
{{- if include "kvmesh.redisPersists" . }}
appendonly yes
appendfsync {{ $redis.persistence.appendfsync }}
{{- end }}
{{- with $redis.config }}
{{ . }}
{{- end }}
{{- end -}}
