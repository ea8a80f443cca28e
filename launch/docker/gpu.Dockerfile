# docker build -f launch/docker/gpu.Dockerfile -t IMAGE .      from the repository; the wheels bring CUDA 13
FROM python:3.11-slim
# What the NVIDIA container toolkit looks for in an image that is not NVIDIA's own.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home --uid 1000 dmpo
WORKDIR /dmpo
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir '.[cuda,tensorboard]'
COPY configs configs
USER dmpo
ENTRYPOINT ["dmpo"]
