{{/* A PodDisruptionBudget: root, component, values (of the service). */}}
{{- define "kvmesh.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "kvmesh.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  # A pod that is not ready serves nobody: it may always go.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "kvmesh.selectorLabels" . | nindent 6 }}
{{- end -}}
