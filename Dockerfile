# Two images: `hetertrain` has all parts, and `broker` is Debian's Mosquitto. Both run as user 10001,
# who owns /data; nothing else of their file systems needs to be written.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hetertrain
WORKDIR /source
# The index of torch's builds for machines without a graphics card: the usual one's are gigabytes.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Wheels in this folder come first, for networks without these indices.
COPY wheel[s]/ /wheels/
COPY constraints.txt ./
RUN mkdir -p /wheels && /opt/hetertrain/bin/pip install --no-cache-dir --find-links /wheels \
      ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY shared shared
COPY cloud cloud
COPY edge edge
COPY vehicle vehicle
COPY lab lab
RUN /opt/hetertrain/bin/pip install --no-cache-dir --find-links /wheels -c constraints.txt \
      '.[cloud,edge,vehicle,lab]'

FROM ${BASE} AS hetertrain
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 ca-certificates \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 hetertrain \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /data hetertrain \
 && for folder in /data /broker /handover; do \
      install -d -o 10001 -g 10001 -m 0750 "$folder"; \
    done
COPY --from=build /opt/hetertrain /opt/hetertrain
COPY --chmod=755 cloud/compose/first-steps cloud/compose/node /usr/local/bin/
ENV PATH=/opt/hetertrain/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 HOME=/data
USER 10001:10001
WORKDIR /data
ENTRYPOINT ["hetertrain"]

FROM ${BASE} AS broker
RUN apt-get update \
 && apt-get install -y --no-install-recommends mosquitto \
 && rm -rf /var/lib/apt/lists/* \
 && install -d -o 10001 -g 10001 -m 0750 /etc/mosquitto/hetertrain
USER 10001:10001
ENTRYPOINT ["/usr/sbin/mosquitto"]
CMD ["-c", "/etc/mosquitto/hetertrain.conf"]
