# docker build -f launch/docker/tpu.Dockerfile -t IMAGE .      from the repository; the wheels bring libtpu
FROM python:3.11-slim
RUN useradd --create-home --uid 1000 dmpo
WORKDIR /dmpo
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir '.[tpu,tensorboard]'
COPY configs configs
# launch/gke/tpu.jobset.yaml overrides the user, as the chips' device files are root's.
USER dmpo
ENTRYPOINT ["dmpo"]
