# One image a service: the build argument EXTRAS picks what is installed.
FROM python:3.11-slim

ARG EXTRAS=""
ARG REQUIREMENTS="requirements/core.txt"

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 10001 rollstream && mkdir -p /data && chown rollstream /data
# Triton and torch.compile build C and C++ code at run time.
RUN case "${EXTRAS}" in *learner*) apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/* ;; esac
WORKDIR /app

COPY requirements/ requirements/
RUN pip install --require-hashes --only-binary :all: -r requirements/setup.txt -r ${REQUIREMENTS}

COPY pyproject.toml README.md LICENSE NOTICE ./
COPY schemas/ schemas/
COPY eventlog/ eventlog/
COPY producers/ producers/
COPY processors/ processors/
COPY learner/ learner/
COPY metrics/ metrics/
COPY replay/ replay/
COPY harness/ harness/
RUN pip install --no-deps --no-build-isolation ".${EXTRAS}"

USER rollstream
ENTRYPOINT ["rollstream"]
