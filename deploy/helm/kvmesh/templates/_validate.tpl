{{/* Values that contradict one another. Each message says which and what to do. */}}

{{- define "kvmesh.validate" -}}
{{- $v := .Values -}}
{{- $redis := include "kvmesh.redisKind" . -}}
{{- $names := include "kvmesh.engineNames" . | fromYamlArray -}}

{{- include "kvmesh.validateTag" (dict "where" "image.tag" "tag" $v.image.tag) -}}
{{- include "kvmesh.validateTag" (dict "where" "redis.bundled.image" "tag" $v.redis.bundled.image) -}}
{{- if and $v.redis.external.url $v.redis.bundled.enabled -}}
{{- fail "redis.external.url and redis.bundled.enabled: choose one (set redis.bundled.enabled to false)" -}}
{{- end -}}
{{- if regexMatch "^[a-z+]+://[^/@]*:[^/@]+@" $v.redis.external.url -}}
{{- fail "redis.external.url holds a password: put it into a secret and name that in redis.external.passwordSecret" -}}
{{- end -}}
{{- if and $v.redis.external.caSecret.name (not (hasPrefix "rediss" $v.redis.external.url)) -}}
{{- fail "redis.external.caSecret needs redis.external.url to begin with rediss://" -}}
{{- end -}}
{{- if and (not $redis) (or $v.limits.budgets $v.auth.keysInRedis) -}}
{{- fail "limits.budgets and auth.keysInRedis need Redis: set redis.bundled.enabled or redis.external.url" -}}
{{- end -}}
{{- if eq $redis "bundled" -}}
{{- if and (include "kvmesh.redisKeeps" .) (hasPrefix "allkeys" $v.redis.bundled.maxmemoryPolicy) -}}
{{- fail "redis.bundled.maxmemoryPolicy allkeys-* would evict budgets and API keys (limits.budgets, auth.keysInRedis): use auto, volatile-ttl or noeviction" -}}
{{- end -}}
{{- if and (include "kvmesh.redisKeeps" .) (eq (toString $v.redis.bundled.persistence.enabled) "false") -}}
{{- fail "redis.bundled.persistence.enabled is false, but budgets or API keys live in Redis (limits.budgets, auth.keysInRedis)" -}}
{{- end -}}
{{- if and $v.redis.bundled.tls.enabled (not $v.tls.enabled) -}}
{{- fail "redis.bundled.tls.enabled needs tls.enabled: its certificate is one of those" -}}
{{- end -}}
{{- end -}}

{{- if and $v.auth.keysSecret.name $v.auth.keysToml -}}
{{- fail "auth.keysSecret.name and auth.keysToml: choose one" -}}
{{- end -}}
{{- with $v.auth.jwt -}}
{{- if and .jwks .jwksConfigMap.name -}}
{{- fail "auth.jwt.jwks and auth.jwt.jwksConfigMap.name: choose one" -}}
{{- end -}}
{{- if and (or .jwks .jwksConfigMap.name) (not (and .issuer .audience)) -}}
{{- fail "auth.jwt needs issuer and audience beside its key set: a token for somebody else is not for us" -}}
{{- end -}}
{{- end -}}

{{- if $v.tls.enabled -}}
{{- if not (or $v.tls.certManager.enabled $v.tls.secretName) -}}
{{- $members := dict "gateway" $v.gateway.enabled "router" $v.router.enabled "engine" true "redis" (and (eq $redis "bundled") $v.redis.bundled.tls.enabled) -}}
{{- range $member, $there := $members -}}
{{- if and $there (not (get ($v.tls.secretNames | default dict) $member)) -}}
{{- fail (printf "tls.enabled needs certificates: set tls.certManager.enabled, tls.secretName, or tls.secretNames.%s" $member) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.tls.public.mode "own") (not $v.tls.public.secretName) -}}
{{- if not $v.tls.certManager.enabled -}}
{{- fail "tls.public.mode own needs tls.public.secretName, or tls.certManager.enabled" -}}
{{- end -}}
{{- if not (and $v.tls.public.certManager.issuerRef.name $v.tls.public.certManager.dnsNames) -}}
{{- fail "tls.public.mode own by cert-manager needs tls.public.certManager.issuerRef.name and dnsNames" -}}
{{- end -}}
{{- end -}}
{{- if and $v.tls.clientCA.secretName (eq $v.tls.public.mode "off") -}}
{{- fail "tls.clientCA needs TLS at the gateway: tls.public.mode must be mesh or own" -}}
{{- end -}}
{{- else -}}
{{- if ne $v.tls.public.mode "mesh" -}}
{{- fail (printf "tls.public.mode %s needs tls.enabled" $v.tls.public.mode) -}}
{{- end -}}
{{- if or $v.tls.certManager.enabled $v.tls.secretName $v.tls.clientCA.secretName -}}
{{- fail "tls.certManager, tls.secretName and tls.clientCA do nothing without tls.enabled" -}}
{{- end -}}
{{- end -}}

{{- include "kvmesh.validateSource" (dict "root" . "where" "model.source" "source" $v.model.source) -}}
{{- if $v.gateway.model.source -}}
{{- include "kvmesh.validateSource" (dict "root" . "where" "gateway.model.source" "source" (mergeOverwrite (deepCopy $v.model.source) $v.gateway.model.source)) -}}
{{- end -}}
{{- if and $v.limits.journal.usageFile (eq $v.limits.journal.type "none") -}}
{{- fail "limits.journal.usageFile needs a volume: limits.journal.type must be emptyDir or pvc" -}}
{{- end -}}
{{- if lt (float64 $v.limits.totalSeconds) (float64 $v.limits.ttftSeconds) -}}
{{- fail "limits.totalSeconds is less than limits.ttftSeconds" -}}
{{- end -}}
{{- range $where, $seconds := dict "gateway" $v.gateway.preStopSeconds "router" $v.router.preStopSeconds -}}
{{- if gt (int $seconds) 20 -}}
{{- fail (printf "%s.preStopSeconds: at most 20, since pods get limits.totalSeconds + 30 s to end" $where) -}}
{{- end -}}
{{- end -}}
{{- include "kvmesh.validateTag" (dict "where" "kvtransfer.image.tag" "tag" ($v.kvtransfer.image | default dict).tag) -}}
{{- $services := dict "gateway" $v.gateway "router" $v.router -}}
{{- range $name := $names }}{{ $_ := set $services (printf "engines.%s" $name) (include "kvmesh.engine" (dict "root" $ "name" $name) | fromYaml) }}{{ end -}}
{{- range $where, $service := $services -}}
{{- include "kvmesh.validateTag" (dict "where" (printf "%s.image.tag" $where) "tag" ($service.image | default dict).tag) -}}
{{- if gt (float64 (($service.settings | default dict).drain_timeout_s | default 0)) (float64 $v.limits.totalSeconds) -}}
{{- fail (printf "%s.settings.drain_timeout_s is above limits.totalSeconds: pods would be killed first" $where) -}}
{{- end -}}
{{- end -}}
{{- $ports := list (int $v.gateway.service.grpcPort) -}}
{{- if $v.gateway.http.enabled }}{{ $ports = append $ports (int $v.gateway.service.httpPort) }}{{ end -}}
{{- if and $v.tls.enabled $v.tls.clientCA.secretName }}{{ $ports = append $ports 8443 }}{{ end -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- fail "gateway.service: grpcPort, httpPort and 8443 (tls.clientCA) must differ" -}}
{{- end -}}
{{- if and $v.gateway.http.playground (not $v.gateway.http.enabled) -}}
{{- fail "gateway.http.playground needs gateway.http.enabled" -}}
{{- end -}}
{{- if not $names -}}
{{- fail "no engine is enabled: the mesh has nothing to answer with" -}}
{{- end -}}
{{- $decodes := false -}}
{{- range $name := $names -}}
{{- $engine := include "kvmesh.engine" (dict "root" $ "name" $name) | fromYaml -}}
{{- include "kvmesh.validateEngine" (dict "root" $ "name" $name "engine" $engine) -}}
{{- if has $engine.role (list "decode" "unified") }}{{ $decodes = true }}{{ end -}}
{{- end -}}
{{- if and $v.gateway.enabled (not $decodes) -}}
{{- fail "no engine of role decode or unified is enabled: gateways would have nobody to ask" -}}
{{- end -}}
{{- end -}}

{{- define "kvmesh.validateEngine" -}}
{{- $engine := .engine -}}
{{- $where := printf "engines.%s" .name -}}
{{- if has .name (list "gateway" "router" "redis" "mesh" "router-fleet" "gateway-headless" "engine" "engines" "public" "ca") -}}
{{- fail (printf "%s: this name is taken by the chart itself" $where) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,14}[a-z0-9])?$" .name) -}}
{{- fail (printf "%s: a name has at most 16 of a-z, 0-9 and -, and begins with a letter" $where) -}}
{{- end -}}
{{- if not (has ($engine.role | default "") (list "prefill" "decode" "unified")) -}}
{{- fail (printf "%s.role must be prefill, decode or unified" $where) -}}
{{- end -}}
{{- if and (ne $engine.device "cuda") (gt (int $engine.gpus) 0) -}}
{{- fail (printf "%s.gpus needs device cuda" $where) -}}
{{- end -}}
{{- $local := int $engine.tp -}}
{{- if $engine.multiNode.enabled -}}
{{- if ne (mod (int $engine.tp) (int $engine.multiNode.hosts)) 0 -}}
{{- fail (printf "%s: tp (%d) must be a multiple of multiNode.hosts (%d)" $where (int $engine.tp) (int $engine.multiNode.hosts)) -}}
{{- end -}}
{{- if hasKey .root.Values.engines (printf "%s-hosts" .name) -}}
{{- fail (printf "engines.%s-hosts: %s has hosts, which take this name" .name $where) -}}
{{- end -}}
{{- $local = div (int $engine.tp) (int $engine.multiNode.hosts) -}}
{{- if ne $engine.role "unified" -}}
{{- fail (printf "%s: an engine of several hosts must have role unified: its KV cannot travel yet" $where) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (int $engine.gpus) 0) (lt (int $engine.gpus) $local) -}}
{{- fail (printf "%s: gpus (%d) is less than the ranks of a pod (%d)" $where (int $engine.gpus) $local) -}}
{{- end -}}
{{- if and (eq $engine.device "cuda") (gt (int $engine.tp) 1) (ne $engine.role "unified") -}}
{{- fail (printf "%s: tp above 1 on GPUs needs role unified: KV of several ranks on GPUs cannot be sent or received yet" $where) -}}
{{- end -}}
{{- if and $engine.rdma.enabled (not (include "kvmesh.engineHasSidecar" (dict "engine" $engine))) -}}
{{- fail (printf "%s.rdma needs the sidecar: a role other than unified, and kvtransfer.enabled" $where) -}}
{{- end -}}
{{- if and (eq $engine.role "prefill") (not $engine.kvtransfer.enabled) -}}
{{- fail (printf "%s: role prefill is of no use without kvtransfer.enabled" $where) -}}
{{- end -}}
{{- range $transport := concat $engine.kvtransfer.transports $engine.rdma.transports -}}
{{- if has $transport (list "shm" "nvlink") -}}
{{- fail (printf "%s: transport %s needs peers that share sockets and devices, which pods do not; use tcp, verbs or efa" $where $transport) -}}
{{- end -}}
{{- end -}}
{{- if and (not $engine.rdma.enabled) (or (has "verbs" $engine.kvtransfer.transports) (has "efa" $engine.kvtransfer.transports)) -}}
{{- fail (printf "%s.kvtransfer.transports names a NIC's transport: set rdma.enabled and rdma.transports" $where) -}}
{{- end -}}
{{- if gt (int $engine.preStopSeconds) 20 -}}
{{- fail (printf "%s.preStopSeconds: at most 20, since pods get limits.totalSeconds + 30 s to end" $where) -}}
{{- end -}}
{{- $model := include "kvmesh.engineModel" (dict "root" .root "engine" $engine) | fromYaml -}}
{{- include "kvmesh.validateSource" (dict "root" .root "where" (printf "%s.model.source" $where) "source" $model.source) -}}
{{- end -}}

{{/* A tag, or a reference that ends in one: where, tag. */}}
{{- define "kvmesh.validateTag" -}}
{{- if regexMatch "(^|:)latest$" (.tag | default "") -}}
{{- fail (printf "%s: latest names whatever was pushed last, so pods of one release would differ and a rollback would bring nothing back: name a version" .where) -}}
{{- end -}}
{{- end -}}

{{- define "kvmesh.validateSource" -}}
{{- $source := .source -}}
{{- $type := $source.type -}}
{{- if not (has $type (list "packaged" "pvc" "hostPath" "oci" "init")) -}}
{{- fail (printf "%s.type must be packaged, pvc, hostPath, oci or init" .where) -}}
{{- end -}}
{{- if and (eq $type "pvc") (not $source.pvc.claimName) }}{{ fail (printf "%s.type pvc needs pvc.claimName" .where) }}{{ end -}}
{{- if and (eq $type "hostPath") (not (hasPrefix "/" $source.hostPath.path)) }}{{ fail (printf "%s.type hostPath needs an absolute hostPath.path" .where) }}{{ end -}}
{{- include "kvmesh.validateTag" (dict "where" (printf "%s.oci.reference" .where) "tag" $source.oci.reference) -}}
{{- include "kvmesh.validateTag" (dict "where" (printf "%s.init.image" .where) "tag" $source.init.image) -}}
{{- if eq $type "oci" -}}
{{- if not $source.oci.reference }}{{ fail (printf "%s.type oci needs oci.reference" .where) }}{{ end -}}
{{- if not (include "kvmesh.atLeast" (dict "root" .root "version" "1.31")) -}}
{{- fail (printf "%s.type oci needs Kubernetes 1.31 (this is %s)" .where .root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $type "init") (not $source.init.image) }}{{ fail (printf "%s.type init needs init.image" .where) }}{{ end -}}
{{- if contains ".." $source.path }}{{ fail (printf "%s.path must stay within the volume" .where) }}{{ end -}}
{{- end -}}
