# The public vLLM image for CUDA with kvloop's sidecar and connector on top.
#
#   docker build -f deploy/docker/cuda.Dockerfile -t kvloop/worker-cuda .
#
# The image's own Python runs both; kvloop changes none of vLLM's packages.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.25.1

FROM ${VLLM_IMAGE}
USER root
WORKDIR /src
COPY requirements requirements
COPY pyproject.toml hatch_build.py README.md CHANGELOG.md ./
COPY protos protos
COPY kvloop kvloop
COPY services services
# Whatever vLLM has brought stays at its version; nixl is in the image.
RUN python3 -m pip freeze --exclude-editable | grep -v ' @ ' > /tmp/vllm.txt \
 && python3 -m pip install --no-cache-dir -c /tmp/vllm.txt ".[worker]" \
 && python3 -c "import vllm, nixl, services.worker.app" \
 && rm -rf /src /tmp/vllm.txt \
 && useradd --uid 10001 --create-home --home-dir /var/lib/kvloop --shell /usr/sbin/nologin kvloop \
 && install -d -o kvloop -g kvloop /var/lib/kvloop/.cache /var/lib/kvloop/.cache/huggingface
COPY deploy/docker/worker-entrypoint /usr/local/bin/worker-entrypoint
WORKDIR /var/lib/kvloop
USER kvloop
ENV HOME=/var/lib/kvloop PYTHONUNBUFFERED=1
EXPOSE 5600 7300 9300
HEALTHCHECK --interval=5s --timeout=3s --start-period=1800s \
  CMD ["python3", "-m", "services.common.probe", "127.0.0.1:7300", "--service", "kvloop.worker.v1.WorkerService"]
ENTRYPOINT ["worker-entrypoint", "vllm"]
