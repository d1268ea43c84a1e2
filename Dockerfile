# syntax=docker/dockerfile:1
# Images of understudy, for processors and for NVIDIA GPUs (whose driver and container toolkit are the host's):
#   docker build --tag understudy:cpu .
#   docker build --tag understudy:gpu --build-arg DEVICE=gpu .
# docs/cluster.md says how they are run. `python scripts/dockerfile.py` checks this file without docker.
FROM debian:bookworm-slim AS python
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# A compiler and Python's headers: Triton and torch.compile use them while a run starts. wget: KubeRay's probes. tini reaps orphans.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ libnuma1 python3-dev python3-venv tini wget \
 && rm -rf /var/lib/apt/lists/*

# The packages: a layer that stays until one of these files changes. They are compiled here, as who runs the image cannot write there;
# what is written for another Python cannot be.
FROM python AS packages
ARG DEVICE=cpu
WORKDIR /src
COPY constraints.txt pyproject.toml ./
COPY scripts/setup.sh scripts/dependencies.py scripts/
RUN --mount=type=cache,target=/root/.cache \
    bash scripts/setup.sh /opt/understudy "$DEVICE" cluster envs \
 && { /opt/understudy/bin/python -m compileall -q -j 0 /opt/understudy/lib >/dev/null || true; }

FROM python AS wheel
WORKDIR /src
COPY . .
RUN python3 -m venv /tmp/build && /tmp/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM packages AS understudy
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    /opt/understudy/bin/pip install --no-cache-dir --no-deps /wheels/*.whl \
 && useradd --create-home --uid 1000 understudy && install --directory --owner=understudy /work
ENV PATH=/opt/understudy/bin:$PATH \
    RAY_worker_niceness=0 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["tini", "--", "understudy"]
CMD ["--help"]
