{{/*
Combinations that cannot work, refused before anything is installed, each with its remedy.
*/}}
{{- define "vllm-spans.engine.check" -}}
{{- $engine := .Values.engine -}}
{{- $model := .Values.model -}}
{{- if not $model.name -}}
{{- fail "model.name is empty. Set it to a model's name on the hub (Qwen/Qwen3-0.6B) or to a folder in the image; ci/cpu-demo-values.yaml serves the one that the CPU image carries." -}}
{{- end -}}
{{- if and $model.gated (not $model.tokenSecret.name) -}}
{{- fail (printf "model.gated says that %s needs a token, and model.tokenSecret.name is empty. Make a Secret (kubectl create secret generic hub-token --from-literal=token=...) and name it in model.tokenSecret.name." $model.name) -}}
{{- end -}}
{{- if and (eq $engine.kind "Deployment") (gt (int $engine.nodes) 1) -}}
{{- fail (printf "engine.nodes is %d and engine.kind is Deployment, whose pods stand alone. Set engine.kind to LeaderWorkerSet (its operator has to be installed), or engine.nodes to 1." (int $engine.nodes)) -}}
{{- end -}}
{{- if and (eq $engine.kind "LeaderWorkerSet") (lt (int $engine.nodes) 2) -}}
{{- fail "engine.kind is LeaderWorkerSet and engine.nodes is 1: nothing is to be led. Set engine.nodes to 2 or more, or engine.kind to Deployment." -}}
{{- end -}}
{{- $all := mul $engine.gpus $engine.nodes -}}
{{- if and (gt (int $engine.gpus) 0) (ne (int $all) (int $engine.tensorParallelSize)) -}}
{{- fail (printf "engine.tensorParallelSize is %d and there are %d GPUs (engine.gpus %d x engine.nodes %d): a GPU too many idles, one too few stops the start. Make them equal; for more throughput raise engine.replicas." (int $engine.tensorParallelSize) (int $all) (int $engine.gpus) (int $engine.nodes)) -}}
{{- end -}}
{{- if hasKey ($engine.resources.limits | default dict) $engine.gpuResource -}}
{{- fail (printf "engine.resources.limits names %s, which engine.gpus sets. Remove it there." $engine.gpuResource) -}}
{{- end -}}
{{- if and (not $model.offline) (lt (int $engine.probes.startupSeconds) 1800) -}}
{{- fail (printf "engine.probes.startupSeconds is %d and the model may have to be downloaded: an engine that is ended in the middle of it begins anew, forever. Use 1800 or more, or set model.offline where the model is in the image or in the cache." (int $engine.probes.startupSeconds)) -}}
{{- end -}}
{{- include "vllm-spans.flags.check" . -}}
{{- include "vllm-spans.offload.check" . -}}
{{- include "vllm-spans.surge.check" . -}}
{{- include "vllm-spans.scaling.check" . -}}
{{- end }}

{{/* Do several pods use a volume? */}}
{{- define "vllm-spans.severalPods" -}}
{{- if or (gt (int .Values.engine.replicas) 1) (gt (int .Values.engine.nodes) 1) .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}true{{- end -}}
{{- end }}

{{- define "vllm-spans.offload.check" -}}
{{- $engine := .Values.engine -}}
{{- $shared := .Values.offload.shared -}}
{{- $several := include "vllm-spans.severalPods" . -}}
{{- $cache := .Values.model.cache -}}
{{- if and $cache.enabled $several (ne $cache.accessMode "ReadWriteMany") -}}
{{- fail (printf "model.cache.accessMode is %s and several engine pods use the volume: those on other nodes would wait for it forever. Use ReadWriteMany, or clear model.cache.enabled: each pod then downloads the model." $cache.accessMode) -}}
{{- end -}}
{{- $tier := include "vllm-spans.tierBytes" . | int64 -}}
{{- if and $tier (gt (int $engine.nodes) 1) -}}
{{- fail (printf "engine.nodes is %d and a tier of offload is on: its CPU memory is shared by processes of one node. Switch offload.cpu and offload.shared off, or use one node." (int $engine.nodes)) -}}
{{- end -}}
{{- $shm := include "vllm-spans.bytes" $engine.shm.size | int64 -}}
{{- if lt $shm (add $tier 167772160 | int64) -}}
{{- fail (printf "engine.shm.size is %s and the CPU tier takes %d MiB of it (offload.cpu.size, or 256 MiB for files to pass through); the engine itself needs 160 MiB. Raise engine.shm.size, or lower offload.cpu.size." (toString $engine.shm.size) (div $tier 1048576)) -}}
{{- end -}}
{{- $memory := dig "limits" "memory" "" $engine.resources -}}
{{- if $memory -}}
{{- $bytes := include "vllm-spans.bytes" $memory | int64 -}}
{{- if le $bytes (add $tier 1073741824 | int64) -}}
{{- fail (printf "engine.resources.limits.memory is %s: what is in /dev/shm counts as the pod's memory, so %d MiB of CPU tier and 1 GiB of engine do not fit. Raise the limit, or lower offload.cpu.size." (toString $memory) (div $tier 1048576)) -}}
{{- end -}}
{{- end -}}
{{- $requested := dig "requests" "memory" "" $engine.resources -}}
{{- if and $requested (lt (include "vllm-spans.bytes" $requested | int64) $tier) -}}
{{- fail (printf "engine.resources.requests.memory is %s and the CPU tier alone takes %d MiB at the start: the pod may be put where they are not free, and is evicted there. Raise the request." (toString $requested) (div $tier 1048576)) -}}
{{- end -}}
{{- if $shared.enabled -}}
{{- if and $several (ne $shared.accessMode "ReadWriteMany") -}}
{{- fail (printf "offload.shared.accessMode is %s and several engine pods share the volume: all but one would wait for it forever. Use a storage class with ReadWriteMany, or switch offload.shared off and offload.cpu on." $shared.accessMode) -}}
{{- end -}}
{{- if and $shared.limit (gt (include "vllm-spans.bytes" $shared.limit | int64) (include "vllm-spans.bytes" $shared.size | int64)) -}}
{{- fail (printf "offload.shared.limit (%s) is more than offload.shared.size (%s): the volume would be full before old files go. Lower the limit, or enlarge the volume." (toString $shared.limit) (toString $shared.size)) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* A pod that comes before another goes may come to another node, where a volume of one node cannot follow. */}}
{{- define "vllm-spans.surge.check" -}}
{{- if and (eq .Values.engine.kind "Deployment") (ne (trimSuffix "%" (toString .Values.engine.rollout.maxSurge)) "0") -}}
{{- $volumes := dict "model.cache" .Values.model.cache "offload.shared" .Values.offload.shared -}}
{{- range $name, $volume := $volumes -}}
{{- if and $volume.enabled (ne $volume.accessMode "ReadWriteMany") -}}
{{- fail (printf "engine.rollout.maxSurge is %s and %s.accessMode is %s: on another node the new pod of a rollout would wait for the volume of the old one. Set maxSurge to 0 and maxUnavailable to 1, or use ReadWriteMany." (toString $.Values.engine.rollout.maxSurge) $name $volume.accessMode) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "vllm-spans.scaling.check" -}}
{{- $engine := .Values.engine -}}
{{- if and .Values.autoscaling.hpa.enabled .Values.autoscaling.keda.enabled -}}
{{- fail "autoscaling.hpa and autoscaling.keda would both set the number of engines. KEDA makes an HPA of its own: clear autoscaling.hpa.enabled." -}}
{{- end -}}
{{- range $name := list "hpa" "keda" -}}
{{- if and (index $.Values.autoscaling $name).enabled (gt (int $engine.replicas) 1) (eq $engine.kind "Deployment") -}}
{{- fail (printf "engine.replicas is %d and autoscaling.%s sets the number of engines: the one would be passed over. Leave engine.replicas at 1 and set autoscaling.%s.minReplicas." (int $engine.replicas) $name $name) -}}
{{- end -}}
{{- with index $.Values.autoscaling $name -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "autoscaling.%s.minReplicas (%d) is more than maxReplicas (%d). Swap them." $name (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if and .enabled (eq $engine.kind "LeaderWorkerSet") -}}
{{- fail (printf "autoscaling.%s scales Deployments, and engine.kind is LeaderWorkerSet. Clear autoscaling.%s.enabled and set engine.replicas." $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.autoscaling.keda.enabled (not .Values.autoscaling.keda.prometheus) -}}
{{- fail "autoscaling.keda.prometheus is empty: KEDA asks Prometheus for the requests that wait. Set it to the address of yours (http://prometheus.monitoring:9090)." -}}
{{- end -}}
{{- if and (eq (toString $engine.rollout.maxSurge) "0") (eq (toString $engine.rollout.maxUnavailable) "0") -}}
{{- fail "engine.rollout.maxSurge and engine.rollout.maxUnavailable are both 0, so no rollout could begin. Set maxSurge to 1 where a GPU is spare, else maxUnavailable to 1." -}}
{{- end -}}
{{- end }}
