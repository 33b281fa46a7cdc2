# docker build -t shoal . && docker run --shm-size=2g shoal train digits -n 2
FROM python:3.11-slim
WORKDIR /shoal
COPY pyproject.toml setup.py constraints.txt MANIFEST.in README.md LICENSE ./
COPY shoal shoal
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
    && pip install --no-cache-dir -c constraints.txt ".[train,plots,tensorboard]" \
    && apt-get purge -y --auto-remove gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /work
ENTRYPOINT ["shoal"]
