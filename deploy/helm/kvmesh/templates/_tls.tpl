{{/* Certificates of the mesh. `member` is gateway, router, engine or redis. */}}

{{- define "kvmesh.tlsServerName" -}}
{{- .Values.tls.serverName | default (printf "%s.%s.svc" (include "kvmesh.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{/* Secret of a member's certificate: root, member. */}}
{{- define "kvmesh.tlsSecretName" -}}
{{- $tls := .root.Values.tls -}}
{{- get ($tls.secretNames | default dict) .member | default $tls.secretName | default (printf "%s-%s-tls" (include "kvmesh.fullname" .root) .member) -}}
{{- end -}}

{{- define "kvmesh.publicTlsSecretName" -}}
{{- .Values.tls.public.secretName | default (printf "%s-public-tls" (include "kvmesh.fullname" .)) -}}
{{- end -}}

{{/* Settings `tls.*` of a member as YAML, "" without TLS: root, member. */}}
{{- define "kvmesh.tlsSettings" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.enabled -}}
ca: /etc/kvmesh/tls/ca.crt
server_name: {{ include "kvmesh.tlsServerName" .root | quote }}
{{- if and (eq .member "gateway") (ne $tls.public.mode "mesh") }}
inner_cert: /etc/kvmesh/tls/tls.crt
inner_key: /etc/kvmesh/tls/tls.key
{{- if eq $tls.public.mode "own" }}
cert: /etc/kvmesh/public-tls/tls.crt
key: /etc/kvmesh/public-tls/tls.key
{{- end }}
{{- else }}
cert: /etc/kvmesh/tls/tls.crt
key: /etc/kvmesh/tls/tls.key
{{- end }}
{{- if ne .member "gateway" }}
require_client_cert: {{ $tls.mutual }}
{{- else if $tls.clientCA.secretName }}
client_ca: /etc/kvmesh/client-ca/ca.crt
client_listen: {{ include "kvmesh.listen" (dict "root" .root "port" 8443) | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Whether a member's server speaks TLS: "true" or "". */}}
{{- define "kvmesh.servesTls" -}}
{{- $tls := .root.Values.tls -}}
{{- if and $tls.enabled (or (ne .member "gateway") (ne $tls.public.mode "off")) -}}true{{- end -}}
{{- end -}}

{{- define "kvmesh.tlsVolumes" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.enabled }}
- name: tls
  secret: { secretName: {{ include "kvmesh.tlsSecretName" . | quote }}, defaultMode: 0440 }
{{- if eq .member "gateway" }}
{{- if eq $tls.public.mode "own" }}
- name: public-tls
  secret: { secretName: {{ include "kvmesh.publicTlsSecretName" .root | quote }}, defaultMode: 0440 }
{{- end }}
{{- with $tls.clientCA.secretName }}
- name: client-ca
  secret: { secretName: {{ . | quote }}, defaultMode: 0440, items: [{ key: {{ $tls.clientCA.key | quote }}, path: ca.crt }] }
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvmesh.tlsMounts" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.enabled }}
- { name: tls, mountPath: /etc/kvmesh/tls, readOnly: true }
{{- if eq .member "gateway" }}
{{- if eq $tls.public.mode "own" }}
- { name: public-tls, mountPath: /etc/kvmesh/public-tls, readOnly: true }
{{- end }}
{{- if $tls.clientCA.secretName }}
- { name: client-ca, mountPath: /etc/kvmesh/client-ca, readOnly: true }
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
