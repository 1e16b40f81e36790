# docker build --file examples/libraries/sync.Dockerfile --build-arg PACKAGES="keras tensorflow-cpu" --tag keras-fit:1 examples
FROM python:3.13-slim
ARG PACKAGES
RUN pip install --no-cache-dir $PACKAGES
COPY *.py /train/
