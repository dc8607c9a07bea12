{{/* What the gateway is told. */}}

{{- define "kvmesh.keysSecretName" -}}
{{- .Values.auth.keysSecret.name | default (ternary (printf "%s-keys" (include "kvmesh.fullname" .)) "" (ne .Values.auth.keysToml "")) -}}
{{- end -}}

{{/* Gateway processes of the release, each of which keeps its share of a limit while Redis is away. */}}
{{- define "kvmesh.limitReplicas" -}}
{{- $gateway := .Values.gateway -}}
{{- $pods := $gateway.replicas -}}
{{- if $gateway.autoscaling.enabled }}{{ $pods = $gateway.autoscaling.maxReplicas | default $pods }}{{ end -}}
{{- int .Values.limits.replicas | default (mul (max 1 (int $pods)) (int $gateway.processes)) -}}
{{- end -}}

{{/* `env` of the gateway: root, member, component, model. */}}
{{- define "kvmesh.gatewayEnv" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $gateway := $values.gateway -}}
{{- $redis := include "kvmesh.redisSettings" $root | fromYaml -}}
{{- $shared := include "kvmesh.sharedSettings" (dict "root" $root "tlsSettings" (include "kvmesh.tlsSettings" .)) | fromYaml -}}
{{- $limits := dict
      "replicas" (include "kvmesh.limitReplicas" $root)
      "budget_away" $values.limits.budgetAway -}}
{{- if ne $values.limits.journal.type "none" -}}
{{- $_ := set $limits "journal" "/var/lib/kvmesh/journal" -}}
{{- if $values.limits.journal.usageFile }}{{ $_ := set $limits "usage_file" "/var/lib/kvmesh/usage.jsonl" }}{{ end -}}
{{- end -}}
{{- $own := merge $shared $redis (dict
      "listen" (include "kvmesh.listen" (dict "root" $root "port" 8080))
      "advertise" (include "kvmesh.podAddress" (dict "root" $root "port" 8080))
      "http_listen" (ternary (include "kvmesh.listen" (dict "root" $root "port" 8000)) "" $gateway.http.enabled)
      "peer_listen" (include "kvmesh.podAddress" (dict "root" $root "port" 8081))
      "processes" $gateway.processes
      "playground" $gateway.http.playground
      "cors_origins" $gateway.http.corsOrigins
      "model" (include "kvmesh.modelSetting" .)
      "workers" (include "kvmesh.engineTargets" (dict "root" $root "roles" (list "decode" "unified")))
      "ttft_limit_s" $values.limits.ttftSeconds
      "total_limit_s" $values.limits.totalSeconds
      "keys_in_redis" $values.auth.keysInRedis
      "limits" $limits) -}}
{{- if $values.router.enabled -}}
{{- $_ := set $own "routers" (printf "dns:///%s:50052" (include "kvmesh.dns" (dict "root" $root "name" (include "kvmesh.componentName" (dict "root" $root "component" "router"))))) -}}
{{- end -}}
{{- if include "kvmesh.keysSecretName" $root }}{{ $_ := set $own "credentials_file" "/etc/kvmesh/keys/keys.toml" }}{{ end -}}
{{- with $values.auth.jwt -}}
{{- $jwks := ternary "/etc/kvmesh/jwks/jwks.json" .jwks (ne .jwksConfigMap.name "") -}}
{{- if $jwks -}}
{{- $_ := set $own "jwt" (dict "jwks" $jwks "issuer" .issuer "audience" .audience "tenant_claim" .tenantClaim) -}}
{{- end -}}
{{- end -}}
{{- $defaults := include "kvmesh.sharedDefaults" (dict "root" $root) | fromYaml -}}
{{- include "kvmesh.env" (dict "root" $root "service" "gateway" "where" "gateway" "own" $own "defaults" $defaults "settings" $gateway.settings "extraEnv" $gateway.extraEnv) -}}
{{- end -}}
