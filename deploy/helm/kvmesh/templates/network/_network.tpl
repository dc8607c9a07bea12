{{/* Peers of network policies. A tier is gateway, router, engine or redis: a label of pods. */}}

{{/* Pods of a tier: root, tier. One item of `from` or `to`. */}}
{{- define "kvmesh.tierPeer" -}}
- podSelector:
    matchLabels:
      {{- include "kvmesh.releaseLabels" .root | nindent 6 }}
      kvmesh.io/tier: {{ .tier }}
{{- end -}}

{{/* A policy's spec begins with whom it is about: root, tier. */}}
{{- define "kvmesh.policyHead" -}}
podSelector:
  matchLabels:
    {{- include "kvmesh.releaseLabels" .root | nindent 4 }}
    kvmesh.io/tier: {{ .tier }}
{{- end -}}

{{- define "kvmesh.policyName" -}}
{{- printf "%s-%s" (include "kvmesh.fullname" .root) .tier -}}
{{- end -}}

{{/* Ingress: who reads metrics. root, ports. */}}
{{- define "kvmesh.metricsIngress" -}}
{{- $policy := .root.Values.networkPolicy -}}
- from:
    - namespaceSelector: {{ $policy.metricsNamespaceSelector | default dict | toJson }}
      {{- with $policy.metricsPodSelector }}
      podSelector: {{ toJson . }}
      {{- end }}
  ports:
    {{- range .ports }}
    - { protocol: TCP, port: {{ . }} }
    {{- end }}
{{- end -}}

{{/* Egress: names, and the collector. root. */}}
{{- define "kvmesh.commonEgress" -}}
{{- $policy := .root.Values.networkPolicy -}}
- ports:
    - { protocol: UDP, port: 53 }
    - { protocol: TCP, port: 53 }
  {{- with $policy.dnsTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- with .root.Values.telemetry.otlpEndpoint }}
- ports:
    - { protocol: TCP, port: {{ include "kvmesh.urlPort" (dict "url" . "default" 4317) }} }
  {{- with $policy.otlpTo }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Egress to Redis: root. "" where there is none. */}}
{{- define "kvmesh.redisEgress" -}}
{{- $kind := include "kvmesh.redisKind" .root -}}
{{- if eq $kind "bundled" -}}
- to:
    {{- include "kvmesh.tierPeer" (dict "root" .root "tier" "redis") | nindent 4 }}
  ports:
    - { protocol: TCP, port: 6379 }
{{- else if eq $kind "external" -}}
{{- $to := .root.Values.networkPolicy.redisTo -}}
{{- if and $to .root.Values.redis.external.cluster -}}
{{- /* Nodes of a cluster tell of one another, and each may have a port of its own. */ -}}
- to:
    {{- toYaml $to | nindent 4 }}
{{- else -}}
- ports:
    - { protocol: TCP, port: {{ include "kvmesh.urlPort" (dict "url" .root.Values.redis.external.url "default" 6379) }} }
  {{- with $to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Port of a URL: url, default. */}}
{{- define "kvmesh.urlPort" -}}
{{- $port := regexFind ":[0-9]+$" (urlParse .url).host -}}
{{- $port | trimPrefix ":" | default (toString .default) -}}
{{- end -}}
