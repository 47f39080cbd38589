# docker build -t compress .                                           for CPUs, with torch's build for CPUs
# docker build -t compress --build-arg EXTRAS=[all-cpu] .              with phones, timm and search
# docker build -t compress --build-arg TORCH=https://pypi.org/simple --build-arg EXTRAS=[tensorrt,timm] .     for NVIDIA GPUs: run with --gpus all
FROM python:3.12-slim

ARG EXTRAS=""
ARG TORCH="https://download.pytorch.org/whl/cpu"
ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1

WORKDIR /opt/compress
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY compress compress
COPY recipes recipes
RUN pip install --constraint constraints.txt --index-url "${TORCH}" --extra-index-url https://pypi.org/simple torch torchvision \
    && pip install --constraint constraints.txt ".${EXTRAS}" \
    && useradd --create-home --uid 1000 user

USER 1000
WORKDIR /home/user
ENTRYPOINT ["compress-vision"]
CMD ["--help"]
