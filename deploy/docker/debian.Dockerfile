# PostgreSQL, HAProxy and Prometheus from Debian's packages, for machines that can
# pull no public image. They take the place of those in docker-compose.yml:
# docker-compose.debian.yml has the names.
ARG BASE_IMAGE=debian:bookworm-20250520-slim

FROM ${BASE_IMAGE} AS postgres
# The package would make a cluster of its own in the image.
RUN install -d /etc/postgresql-common \
 && echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf \
 && apt-get update \
 && apt-get install -y --no-install-recommends postgresql \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY deploy/docker/postgres-entrypoint /usr/local/bin/postgres-entrypoint
RUN install -d -o postgres -g postgres -m 700 /var/lib/postgresql/data \
 && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/
USER postgres
VOLUME /var/lib/postgresql/data
EXPOSE 5432
STOPSIGNAL SIGINT
ENTRYPOINT ["postgres-entrypoint"]

FROM ${BASE_IMAGE} AS haproxy
RUN apt-get update \
 && apt-get install -y --no-install-recommends haproxy \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
USER haproxy
CMD ["haproxy", "-W", "-db", "-f", "/usr/local/etc/haproxy/haproxy.cfg"]

FROM ${BASE_IMAGE} AS prometheus
RUN apt-get update \
 && apt-get install -y --no-install-recommends prometheus \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
 && install -d -o prometheus -g prometheus /prometheus
USER prometheus
VOLUME /prometheus
EXPOSE 9090
ENTRYPOINT ["prometheus"]
