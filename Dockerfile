# Four images from one file and one lock: `operator` (no torch, no boto3), `runtime` (no kopf, no Kubernetes
# client), `sync` (the stores' libraries and NVML's, no torch), for checkpoint.mode Sync and runtime.inject, and `prices`
# (boto3, no Kubernetes client), which only the price CronJob needs. Each ends in a check that fails when the others' dependencies got in. The code
# is the last, small layer, so that a change of code rebuilds and loads in seconds. Built by
# dev/localcluster/images.py, or by `docker build --target runtime .`. A fifth one, `runtime-tests`, is never shipped:
# `runtime` and Accelerate.
ARG BASE_IMAGE=debian:bookworm-slim
# Whom the build trusts when it fetches packages; a machine behind a proxy mounts its own bundle and names it.
ARG CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt

FROM ${BASE_IMAGE} AS base
RUN export DEBIAN_FRONTEND=noninteractive && apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1

# What each image installs, with checksums, as uv.lock says. The layers below are keyed by these files and not by
# pyproject.toml, so that a changed lint rule does not fetch torch again.
FROM base AS lock
ARG CA_BUNDLE
RUN python3 -m venv /opt/uv && PIP_CERT=$CA_BUNDLE /opt/uv/bin/pip install -q --no-cache-dir uv==0.13.9
COPY pyproject.toml uv.lock /lock/
COPY cli/pyproject.toml /lock/cli/
RUN cd /lock && export UV_PYTHON=/usr/bin/python3 UV_PYTHON_DOWNLOADS=never UV_NO_CACHE=1 \
    && export="/opt/uv/bin/uv export --quiet --frozen --no-dev --no-emit-workspace --no-header --no-annotate" \
    && mkdir /out \
    && $export --only-group operator > /out/operator.txt \
    && $export --only-group prices > /out/prices.txt \
    && $export --extra s3 --extra gcs --extra gpu > /out/sync.txt \
    && $export --extra runtime --extra gcs > /out/runtime.txt \
    && $export --extra runtime --extra gcs --no-emit-package torch --no-emit-package triton > /out/cuda.txt \
    && /opt/uv/bin/uv export --quiet --frozen --only-dev --no-emit-workspace --no-header --no-annotate > /out/dev.txt \
    && touch -d @0 /out/*

# The tools of an install, in one place. uv is lent to a layer and leaves with it.
FROM base AS installer
ARG CA_BUNDLE
RUN { echo '#!/bin/sh -e'; \
      echo 'python3 -m venv /tmp/uv'; \
      echo 'PIP_CERT=$CA_BUNDLE /tmp/uv/bin/pip install -q --no-cache-dir uv==0.13.9'; \
      echo '[ -d /opt/venv ] || /usr/bin/python3 -m venv --without-pip /opt/venv'; \
      echo 'export SSL_CERT_FILE=$CA_BUNDLE UV_PYTHON=/opt/venv/bin/python3 UV_NO_CACHE=1'; \
      echo '/tmp/uv/bin/uv pip install --no-deps --require-hashes --compile-bytecode -r $1'; \
      echo 'echo /opt/spottrain/lib > /opt/venv/lib/python3.11/site-packages/spottrain.pth'; \
      echo 'rm -rf /tmp/uv'; } > /usr/local/bin/install-locked \
    && chmod +x /usr/local/bin/install-locked

FROM installer AS operator
ARG CA_BUNDLE
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp spottrain
COPY --from=lock /out/operator.txt /opt/spottrain/
RUN install-locked /opt/spottrain/operator.txt
COPY runtime/spottrain/__init__.py runtime/spottrain/contract.py /opt/spottrain/lib/spottrain/
COPY runtime/spottrain/core/__init__.py runtime/spottrain/core/lazy.py /opt/spottrain/lib/spottrain/core/
COPY operator/spottrain_operator /opt/spottrain/lib/spottrain_operator
RUN python3 -m compileall -q /opt/spottrain/lib \
    && python3 -c "import kopf, kubernetes.aio, spottrain.contract, spottrain_operator" \
    && for foreign in torch boto3; do \
         if python3 -c "import $foreign" 2>/dev/null; then echo "$foreign got into the operator image"; exit 1; fi; \
       done
USER 65532:65532
ENTRYPOINT ["python3", "-m", "spottrain_operator"]

# Of the operator it has the price list's own module, how settings are read, and what these import.
FROM installer AS prices
ARG CA_BUNDLE
RUN useradd --uid 65532 --user-group --no-create-home --home-dir /tmp spottrain
COPY --from=lock /out/prices.txt /opt/spottrain/
RUN install-locked /opt/spottrain/prices.txt
COPY runtime/spottrain/__init__.py runtime/spottrain/contract.py /opt/spottrain/lib/spottrain/
COPY runtime/spottrain/core/__init__.py runtime/spottrain/core/lazy.py /opt/spottrain/lib/spottrain/core/
COPY operator/spottrain_operator/__init__.py operator/spottrain_operator/environment.py operator/spottrain_operator/errors.py \
     operator/spottrain_operator/names.py /opt/spottrain/lib/spottrain_operator/
COPY operator/spottrain_operator/api/__init__.py operator/spottrain_operator/api/node_pools.py \
     operator/spottrain_operator/api/prices.py operator/spottrain_operator/api/wire.py \
     /opt/spottrain/lib/spottrain_operator/api/
COPY operator/spottrain_prices /opt/spottrain/lib/spottrain_prices
RUN python3 -m compileall -q /opt/spottrain/lib \
    && python3 -c "import boto3, spottrain_prices.__main__" \
    && for foreign in torch kopf kubernetes aiohttp; do \
         if python3 -c "import $foreign" 2>/dev/null; then echo "$foreign got into the image prices"; exit 1; fi; \
       done
USER 65532:65532
ENTRYPOINT ["python3", "-m", "spottrain_prices"]

# The whole package without torch, so that `spottrain checkpoints delete` is there too: it deletes a deleted job's checkpoints.
FROM installer AS sync
ARG CA_BUNDLE
RUN useradd --uid 1000 --user-group --no-create-home --home-dir /tmp spottrain
COPY --from=lock /out/sync.txt /opt/spottrain/
RUN install-locked /opt/spottrain/sync.txt \
    && printf '%s\n' '#!/usr/bin/env -S --block-signal=TERM,INT /opt/venv/bin/python3' \
         'import sys' 'from spottrain.cli.entry import main' 'sys.exit(main())' \
       > /opt/venv/bin/spottrain \
    && chmod +x /opt/venv/bin/spottrain
COPY runtime/spottrain /opt/spottrain/lib/spottrain
RUN python3 -m compileall -q /opt/spottrain/lib \
    && python3 -c "import boto3, google.cloud.storage, pynvml, spottrain" \
    && spottrain sync --help > /dev/null && spottrain checkpoints delete --help > /dev/null \
    && spottrain inject /tmp/injected > /dev/null && rm -r /tmp/injected \
    && for foreign in torch numpy kopf kubernetes; do \
         if python3 -c "import $foreign" 2>/dev/null; then echo "$foreign got into the image sync"; exit 1; fi; \
       done
ENV HOME=/tmp
USER 1000:1000
ENTRYPOINT ["spottrain", "sync"]

FROM installer AS packages
ARG CA_BUNDLE
# torch.compile builds C++ at run time: a compiler and Python's headers are part of the product.
RUN export DEBIAN_FRONTEND=noninteractive && apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
    && useradd --uid 1000 --user-group --no-create-home --home-dir /tmp spottrain
# Two layers, CUDA's libraries and then the rest: a build tool holds a layer up to four times while it commits it.
COPY --from=lock /out/cuda.txt /opt/spottrain/
RUN install-locked /opt/spottrain/cuda.txt
COPY --from=lock /out/runtime.txt /opt/spottrain/
# env holds the signals before the interpreter starts: at PID 1 the kernel throws away what has no handler yet.
RUN install-locked /opt/spottrain/runtime.txt \
    && printf '%s\n' '#!/usr/bin/env -S --block-signal=TERM,INT /opt/venv/bin/python3' \
         'import sys' 'from spottrain.cli.entry import main' 'sys.exit(main())' \
       > /opt/venv/bin/spottrain \
    && chmod +x /opt/venv/bin/spottrain

# What `make wheel` builds, unpacked: the package, and its metadata with the entry points that other libraries read.
FROM base AS wheel
ARG CA_BUNDLE
RUN python3 -m venv /opt/build && PIP_CERT=$CA_BUNDLE /opt/build/bin/pip install -q --no-cache-dir hatchling==1.27.0
COPY pyproject.toml README.md LICENSE /src/
COPY runtime/spottrain /src/runtime/spottrain
RUN cd /src && /opt/build/bin/python -m hatchling build --target wheel --directory /tmp/dist \
    && python3 -m zipfile -e /tmp/dist/*.whl /out && find /out -exec touch -d @0 {} +

FROM packages AS runtime
COPY --from=wheel /out /opt/spottrain/lib
COPY examples /opt/spottrain/examples
RUN python3 -m compileall -q /opt/spottrain/lib \
    && python3 -c "import torch, boto3, google.cloud.storage, pynvml, safetensors, spottrain" \
    && spottrain --help > /dev/null && spottrain inject /tmp/injected > /dev/null && rm -r /tmp/injected \
    && for foreign in kopf kubernetes; do \
         if python3 -c "import $foreign" 2>/dev/null; then echo "$foreign got into the runtime image"; exit 1; fi; \
       done
# The root file system is mounted read-only; whatever writes, writes below /tmp or a volume of the pod.
ENV HOME=/tmp
USER 1000:1000
WORKDIR /opt/spottrain
ENTRYPOINT ["spottrain", "run"]

# Accelerate and what it needs beyond the runtime's packages, beside them: a change of code leaves it alone.
FROM packages AS accelerate
ARG CA_BUNDLE
COPY --from=lock /out/dev.txt /opt/spottrain/
RUN /usr/bin/python3 -m venv /tmp/uv \
    && PIP_CERT=$CA_BUNDLE /tmp/uv/bin/pip install -q --no-cache-dir uv==0.13.9 \
    && export SSL_CERT_FILE=$CA_BUNDLE UV_PYTHON=/opt/venv/bin/python3 UV_NO_CACHE=1 \
    && grep -oE '^accelerate==[^ ]+' /opt/spottrain/dev.txt > /tmp/wanted.txt \
    && add="/tmp/uv/bin/uv pip install --require-hashes --constraint /opt/spottrain/dev.txt" \
    && $add --dry-run -r /tmp/wanted.txt 2>&1 | sed -n 's/^ + //p' > /tmp/missing.txt \
    && $add --quiet --no-deps --compile-bytecode --target /opt/accelerate -r /tmp/missing.txt \
    && rm -rf /tmp/uv /tmp/*.txt

FROM runtime AS runtime-tests
COPY --from=accelerate /opt/accelerate /opt/accelerate
ENV PYTHONPATH=/opt/accelerate PATH=/opt/accelerate/bin:$PATH
RUN accelerate launch --help > /dev/null
