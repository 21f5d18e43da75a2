{{- define "vllm-spans.loadtest.spec" -}}
{{- with .Values.loadtest -}}
# A load that failed has said so: the same one again would hit a warm cache and say something else.
backoffLimit: 0
activeDeadlineSeconds: {{ .deadlineSeconds | int64 }}
ttlSecondsAfterFinished: {{ .keepSeconds | int64 }}
template:
  metadata:
    labels:
      {{- include "vllm-spans.selectorLabels" (dict "root" $ "component" "loadtest") | nindent 6 }}
  spec:
    restartPolicy: Never
    automountServiceAccountToken: false
    enableServiceLinks: false
    {{- include "vllm-spans.pullSecrets" $ | nindent 4 }}
    securityContext:
      {{- include "vllm-spans.podSecurity" $ | nindent 6 }}
    containers:
      - name: loadtest
        image: {{ include "vllm-spans.image" (dict "root" $ "image" .image) }}
        imagePullPolicy: {{ .image.pullPolicy }}
        command: [tini, --, python, -m, loadtests]
        args:
          - run
          - /workload/workload.toml
          - --url={{ include "vllm-spans.loadtest.url" $ }}
          {{- with .model }}
          - --model={{ . }}
          {{- end }}
          - --out=/results/$(POD_NAME)
          - --wait={{ .waitSeconds | int64 }}
          - --workers={{ .workers }}
          {{- if not .spans }}
          - --plain
          {{- end }}
          {{- if not .counters }}
          - --no-counters
          {{- end }}
          {{- if .data.claim }}
          - --data=/data/{{ .data.path }}
          {{- end }}
          {{- range $name := list "ttft" "tpot" "e2e" }}
          {{- with index $.Values.loadtest.slo $name }}
          - --{{ $name }}={{ . }}
          {{- end }}
          {{- end }}
          - --share={{ .slo.share }}
          {{- range .args }}
          - {{ . | quote }}
          {{- end }}
        env:
          - name: POD_NAME
            valueFrom:
              fieldRef:
                fieldPath: metadata.name
          # Plots need a folder for fonts, and the container's own files are read-only.
          - name: HOME
            value: /tmp
          - name: MPLCONFIGDIR
            value: /tmp/matplotlib
          {{- if .apiKeySecret.name }}
          - name: OPENAI_API_KEY
            valueFrom:
              secretKeyRef:
                name: {{ .apiKeySecret.name }}
                key: {{ .apiKeySecret.key }}
          {{- end }}
        resources:
          {{- include "vllm-spans.resources" .resources | nindent 10 }}
        securityContext:
          {{- include "vllm-spans.containerSecurity" $ | nindent 10 }}
        volumeMounts:
          - name: workload
            mountPath: /workload
            readOnly: true
          - name: results
            mountPath: /results
          - name: tmp
            mountPath: /tmp
          {{- if .data.claim }}
          - name: data
            mountPath: /data
            readOnly: true
          {{- end }}
    volumes:
      - name: workload
        configMap:
          name: {{ include "vllm-spans.loadtest.name" $ }}
      - name: results
        {{- if .results.claim }}
        persistentVolumeClaim:
          claimName: {{ .results.claim }}
        {{- else }}
        emptyDir:
          sizeLimit: {{ include "vllm-spans.plain" .results.size | quote }}
        {{- end }}
      - name: tmp
        emptyDir:
          sizeLimit: 256Mi
      {{- if .data.claim }}
      - name: data
        persistentVolumeClaim:
          claimName: {{ .data.claim }}
          readOnly: true
      {{- end }}
    {{- include "vllm-spans.placement" . | nindent 4 }}
{{- end -}}
{{- end }}
