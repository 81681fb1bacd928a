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
ENV PATH=/opt/kvloop/bin:$PATH PYTHONUNBUFFERED=1

FROM python AS builder
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
# A base image that trusts a proxy's authority makes pip trust it too.
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_DEFAULT_TIMEOUT=180
WORKDIR /src
COPY requirements requirements
ARG PIP_EXTRA_INDEX_URL
# The same order as in the Makefile, for the reasons at the head of engine-cpu.txt.
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/kvloop \
 && /opt/build/bin/pip --python /opt/kvloop/bin/python install --quiet --no-deps \
    -r requirements/engine-cpu.txt -r requirements/kvloop.txt \
 && /opt/build/bin/pip --python /opt/kvloop/bin/python install --quiet -c requirements/engine-cpu.txt torch
# NIXL wants the package of torch's CUDA, also where nothing computes on a GPU.
RUN cuda=$(/opt/kvloop/bin/python -c 'import torch; print((torch.version.cuda or "").partition(".")[0])') \
 && if [ -n "$cuda" ]; then \
      /opt/build/bin/pip --python /opt/kvloop/bin/python install --quiet --no-deps "nixl-cu$cuda==1.5.1"; \
    fi \
 && /opt/kvloop/bin/python -c 'import nixl._api'
RUN /opt/build/bin/pip install --quiet -c requirements/dev.txt hatchling grpcio-tools==1.85.1 mypy-protobuf==5.1.0
COPY pyproject.toml hatch_build.py README.md CHANGELOG.md ./
COPY protos protos
COPY kvloop kvloop
COPY services services
RUN PATH=/opt/build/bin:$PATH pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/build/bin/pip --python /opt/kvloop/bin/python install --quiet --no-deps /wheels/kvloop-*.whl

FROM python
COPY --from=builder /opt/kvloop /opt/kvloop
COPY deploy/docker/worker-entrypoint /usr/local/bin/worker-entrypoint
WORKDIR /var/lib/kvloop
USER kvloop
ENV HOME=/var/lib/kvloop
EXPOSE 5600 7300 9300
HEALTHCHECK --interval=5s --timeout=3s --start-period=300s \
  CMD ["python", "-m", "services.common.probe", "127.0.0.1:7300"]
ENTRYPOINT ["tini", "--"]
CMD ["worker-entrypoint", "vllm"]
