{{/* An engine's pod template. Argument: root, role (single, leader or worker). */}}
{{- define "vllm-spans.engine.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $worker := eq .role "worker" -}}
{{- $part := dict "root" .root "component" (ternary "worker" "engine" $worker) -}}
metadata:
  labels:
    {{- include "vllm-spans.selectorLabels" $part | nindent 4 }}
    {{- with $values.engine.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.engine.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "vllm-spans.engine.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- include "vllm-spans.pullSecrets" $root | nindent 2 }}
  securityContext:
    {{- include "vllm-spans.podSecurity" $root | nindent 4 }}
    {{- with $values.engine.fsGroup }}
    fsGroup: {{ . | int64 }}
    fsGroupChangePolicy: OnRootMismatch
    {{- end }}
  terminationGracePeriodSeconds: {{ add (include "vllm-spans.preStopSeconds" $root | int64) $values.engine.drainSeconds 20 }}
  {{- with $values.engine.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.engine.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "vllm-spans.image" (dict "root" $root "image" $values.image) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      # The first process of a container gets no signal that it has no handler for, and Python has none while it imports.
      command: [tini, --, vllm-spans, serve]
      args:
        {{- include "vllm-spans.engine.args" . | nindent 8 }}
      env:
        {{- include "vllm-spans.engine.env" $root | nindent 8 }}
      {{- if not $worker }}
      ports:
        - name: http
          containerPort: 8000
          protocol: TCP
      startupProbe:
        httpGet:
          path: {{ include "vllm-spans.engine.readyPath" $root }}
          port: http
        periodSeconds: 5
        timeoutSeconds: 4
        failureThreshold: {{ div (add $values.engine.probes.startupSeconds 4) 5 }}
      readinessProbe:
        httpGet:
          path: {{ include "vllm-spans.engine.readyPath" $root }}
          port: http
        periodSeconds: 5
        timeoutSeconds: {{ $values.engine.probes.timeoutSeconds | int64 }}
        failureThreshold: 2
      # An engine that is busy answers late and is alive: only a minute of silence ends it.
      livenessProbe:
        httpGet:
          path: /health
          port: http
        periodSeconds: 10
        timeoutSeconds: {{ $values.engine.probes.timeoutSeconds | int64 }}
        failureThreshold: {{ $values.engine.probes.livenessFailures | int64 }}
      {{- end }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ include "vllm-spans.preStopSeconds" $root | quote }}]
      resources:
        {{- include "vllm-spans.engine.resources" $root | nindent 8 }}
      securityContext:
        {{- include "vllm-spans.containerSecurity" $root | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /var/cache/vllm-spans
        - name: tmp
          mountPath: /tmp
        - name: shm
          mountPath: /dev/shm
        {{- if $values.offload.shared.enabled }}
        - name: kv
          mountPath: /var/lib/vllm-spans/kv
        {{- end }}
  volumes:
    - name: cache
      {{- if $values.model.cache.enabled }}
      persistentVolumeClaim:
        claimName: {{ $values.model.cache.claim | default (printf "%s-cache" (include "vllm-spans.fullname" $root)) }}
      {{- else }}
      emptyDir: {}
      {{- end }}
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ include "vllm-spans.plain" $values.engine.shm.size | quote }}
    {{- if $values.offload.shared.enabled }}
    - name: kv
      persistentVolumeClaim:
        claimName: {{ $values.offload.shared.claim | default (printf "%s-kv" (include "vllm-spans.fullname" $root)) }}
    {{- end }}
  {{- include "vllm-spans.placement" $values.engine | nindent 2 }}
  {{- with $values.engine.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "vllm-spans.engine.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "vllm-spans.fullname" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}
