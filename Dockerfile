# lightning_fl on CUDA:
#   docker build -t lightning-fl .
#   docker run --rm --gpus all -v "$PWD/runs:/home/federation/runs" lightning-fl fit --config configs/quickstart.yaml
FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

# The image's Python is the system's, in which pip installs only with PIP_BREAK_SYSTEM_PACKAGES.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
WORKDIR /opt/lightning_fl
COPY . .
RUN pip install '.[wandb]'

RUN useradd --create-home federation
USER federation
WORKDIR /home/federation
RUN cp -r /opt/lightning_fl/configs . && mkdir runs data
ENTRYPOINT ["lightning-fl"]
CMD ["--help"]
