# lightning_fl on CUDA. Runs and data stay in mounted folders, which belong to the user who starts the container.
# docs/how-to/docker.md has the commands.
FROM pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime

# The image's Python is the system's, in which pip installs only with PIP_BREAK_SYSTEM_PACKAGES.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
WORKDIR /opt/lightning_fl

# The dependencies come first, with an empty package in place of the code, so that a change of the code does not install them anew.
COPY pyproject.toml setup.py README.md LICENSE ./
RUN packages=$(sed -n 's/^    "\(lightning_fl[a-z_.]*\)",$/\1/p' pyproject.toml | tr . /) \
    && mkdir -p $packages modules callbacks configs && echo '__version__ = "0"' > lightning_fl/__init__.py \
    && pip install . && pip uninstall -y lightning-fl && rm -rf ./*
COPY . .
RUN pip install --no-deps .

# Any user may write here: to the folders, if they are mounted, and caches of libraries to the home.
RUN mkdir -p /work/runs /work/data && cp -r configs /work && chmod -R a+rwX /work
ENV HOME=/work
WORKDIR /work
VOLUME ["/work/runs", "/work/data"]
USER 1000:1000
ENTRYPOINT ["lightning-fl"]
CMD ["--help"]
