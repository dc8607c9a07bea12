{{/* What HPA and ScaledObject share. An engine and its sidecar are one pod, so they scale as one. */}}

{{/* Names of the engines that are scaled in some way, as a YAML list: root, kind (hpa or keda). */}}
{{- define "kvmesh.scaledEngines" -}}
{{- $names := list -}}
{{- range $name := include "kvmesh.engineNames" .root | fromYamlArray -}}
{{- $engine := include "kvmesh.engine" (dict "root" $.root "name" $name) | fromYaml -}}
{{- $scaling := $engine.autoscaling -}}
{{- $role := $engine.role -}}
{{- if and $scaling.enabled (eq $scaling.kind $.kind) -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "engines.%s.autoscaling: minReplicas is above maxReplicas" $name) -}}
{{- end -}}
{{- $signals := ternary (list $scaling.waitingTokens) (list $scaling.queueDelaySeconds $scaling.kvUsage) (eq $role "prefill") -}}
{{- if not (or (compact $signals) (get $scaling (ternary "triggers" "metrics" (eq $.kind "keda")))) -}}
{{- fail (printf "engines.%s.autoscaling: no signal is left to scale by" $name) -}}
{{- end -}}
{{- $names = append $names $name -}}
{{- end -}}
{{- end -}}
{{- toYaml $names -}}
{{- end -}}

{{/* The scale target of an engine: root, name, engine. */}}
{{- define "kvmesh.scaleTarget" -}}
{{- if .engine.multiNode.enabled -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
name: {{ include "kvmesh.hostsName" . | quote }}
{{- else -}}
apiVersion: apps/v1
kind: Deployment
name: {{ include "kvmesh.componentName" (dict "root" .root "component" .name) | quote }}
{{- end -}}
{{- end -}}

{{/*
How fast replicas come and go. A pod that leaves finishes what it has, for up to its grace period: within that time so many
leave and no more, or a wave of drains takes what carries the load. Input: root, scaling.
*/}}
{{- define "kvmesh.scaleBehavior" -}}
{{- $drain := include "kvmesh.terminationGrace" .root | int -}}
scaleUp:
  stabilizationWindowSeconds: {{ int .scaling.scaleUp.stabilizationWindowSeconds }}
  policies:
    - type: Pods
      value: {{ int .scaling.scaleUp.pods }}
      periodSeconds: {{ int .scaling.scaleUp.periodSeconds }}
scaleDown:
  stabilizationWindowSeconds: {{ int .scaling.scaleDown.stabilizationWindowSeconds }}
  policies:
    - type: Pods
      value: {{ int .scaling.scaleDown.pods }}
      periodSeconds: {{ min 1800 (int .scaling.scaleDown.periodSeconds | default $drain) }}
{{- end -}}

{{/* PromQL matchers of one component's pods: root, name (gateway, or an engine's), and engine. Names of a Deployment's pods end
     in -<digest>-<5 letters>, of letters that are no words; what is before the 5 is cut to 58 characters. */}}
{{- define "kvmesh.seriesOf" -}}
{{- $matchers := list (printf "namespace=%q" .root.Release.Namespace) -}}
{{- $letters := "[bcdfghjklmnpqrstvwxz2456789]+" -}}
{{- $name := include "kvmesh.componentName" (dict "root" .root "component" .name) -}}
{{- $pods := printf "%s-%s-%s" $name $letters $letters -}}
{{- if gt (len $name) 46 -}}
{{- $pods = printf "%s-%s(-%s)?" $name $letters $letters -}}
{{- end -}}
{{- if dig "multiNode" "enabled" false (.engine | default dict) -}}
{{- $pods = printf "%s-[0-9]+" (include "kvmesh.hostsName" .) -}}
{{- else if and (eq .name "gateway") (eq .root.Values.limits.journal.type "pvc") -}}
{{- $pods = printf "%s-[0-9]+" $name -}}
{{- end -}}
{{- if or (ne .name "gateway") .root.Values.gateway.enabled -}}
{{- $matchers = append $matchers (printf "pod=~%q" $pods) -}}
{{- end -}}
{{- with .root.Values.autoscaling.prometheus.matchers -}}
{{- $matchers = append $matchers . -}}
{{- end -}}
{{- join "," $matchers -}}
{{- end -}}
