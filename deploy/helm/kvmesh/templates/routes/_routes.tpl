{{/* Seconds that a proxy must let a call run: not less than the total limit, or it cuts answers that are still allowed.
     Input: root, seconds (0 = computed), where (for messages). */}}
{{- define "kvmesh.routes.timeout" -}}
{{- $total := int (ceil .root.Values.limits.totalSeconds) -}}
{{- $given := int .seconds -}}
{{- if and (gt $given 0) (lt $given $total) -}}
{{- fail (printf "%s is %d: below limits.totalSeconds (%d), so that answers would be cut" .where $given $total) -}}
{{- end -}}
{{- $given | default (add $total 30) -}}
{{- end -}}

{{- define "kvmesh.routes.gateway" -}}
{{- if not .Values.gateway.enabled -}}
{{- fail "routes lead to the gateway: set gateway.enabled" -}}
{{- end -}}
{{- include "kvmesh.componentName" (dict "root" . "component" "gateway") -}}
{{- end -}}

{{/* Whether the gateway's public ports speak TLS. "true" or "". */}}
{{- define "kvmesh.routes.publicTls" -}}
{{- if and .Values.tls.enabled (ne .Values.tls.public.mode "off") -}}true{{- end -}}
{{- end -}}
