# docker build -t compress .                                          for CPUs
# docker build -t compress --build-arg EXTRAS=[tensorrt,timm] .        with extras; run with --gpus all
FROM python:3.12-slim

ARG EXTRAS=""
ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1

WORKDIR /opt/compress
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY compress compress
COPY recipes recipes
RUN pip install --constraint constraints.txt ".${EXTRAS}" \
    && useradd --create-home --uid 1000 user

USER 1000
WORKDIR /home/user
ENTRYPOINT ["compress-vision"]
CMD ["--help"]
