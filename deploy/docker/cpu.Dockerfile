# The sidecar with vLLM's CPU build, for trying kvloop without a GPU.
#
#   docker build -f deploy/docker/cpu.Dockerfile -t kvloop/worker-cpu .
#
# With --build-arg PIP_EXTRA_INDEX_URL=... of PyTorch's own index of CPU builds the
# image has a third of the size: the torch of the common index brings CUDA along.
ARG BASE_IMAGE=debian:bookworm-20250520-slim

FROM ${BASE_IMAGE} AS python
# vLLM compiles small kernels at start, for which it needs a compiler.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates g++ libgomp1 libnuma1 python3 python3-dev tini \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /usr/share/doc/* /usr/share/man/* \
 && useradd --uid 10001 --no-create-home --home-dir /var/lib/kvloop --shell /usr/sbin/nologin kvloop \
 && install -d -o kvloop -g kvloop /var/lib/kvloop /models
# A base image that trusts a proxy's authority makes pip and uv trust it too.
ENV PATH=/opt/kvloop/bin:$PATH PYTHONUNBUFFERED=1 \
    SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_HTTP_TIMEOUT=180 UV_NO_CACHE=1

# ---- kvloop itself, and what installs it ------------------------------------------
FROM python AS builder
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/build
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 \
    PIP_DEFAULT_TIMEOUT=180 PATH=/opt/build/bin:$PATH
WORKDIR /src
COPY requirements requirements
RUN pip install --quiet uv==0.13.8 \
 && uv pip install --quiet --python /opt/build -c requirements/dev.txt hatchling grpcio-tools==1.85.1 mypy-protobuf==5.1.0
COPY . .
RUN hatchling build -t wheel -d /wheels

# ---- the image ---------------------------------------------------------------------
FROM python
COPY --from=builder /opt/build/bin/uv /usr/local/bin/uv
COPY requirements/engine-cpu.txt requirements/kvloop.txt /requirements/
ARG PIP_EXTRA_INDEX_URL
# The same order as in the Makefile, for the reasons at the head of engine-cpu.txt. It
# is installed where it stays: to copy 7 GB from stage to stage takes longer than that.
# NIXL wants the package of torch's CUDA, also where nothing computes on a GPU.
RUN export UV_EXTRA_INDEX_URL="$PIP_EXTRA_INDEX_URL" UV_INDEX_STRATEGY=unsafe-best-match UV_PYTHON=/opt/kvloop \
 && install="uv pip install --quiet --compile-bytecode" \
 && uv venv --quiet --python /usr/bin/python3 /opt/kvloop \
 && $install --no-deps -r /requirements/engine-cpu.txt -r /requirements/kvloop.txt \
 && $install -c /requirements/engine-cpu.txt torch \
 && cuda=$(/opt/kvloop/bin/python -c 'import torch; print((torch.version.cuda or "").partition(".")[0])') \
 && if [ -n "$cuda" ]; then $install --no-deps "nixl-cu$cuda==1.5.1"; fi \
 && /opt/kvloop/bin/python -c 'import nixl._api'
COPY --from=builder /wheels /wheels
RUN uv pip install --quiet --python /opt/kvloop --compile-bytecode --no-deps /wheels/kvloop-*.whl
COPY deploy/docker/worker-entrypoint /usr/local/bin/worker-entrypoint
WORKDIR /var/lib/kvloop
USER kvloop
ENV HOME=/var/lib/kvloop
EXPOSE 5600 7300 9300
HEALTHCHECK --interval=5s --timeout=3s --start-period=300s \
  CMD ["python", "-m", "services.common.probe", "127.0.0.1:7300", "--service", "kvloop.worker.v1.WorkerService"]
ENTRYPOINT ["tini", "--"]
CMD ["worker-entrypoint", "vllm"]
