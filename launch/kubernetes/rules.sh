#!/bin/sh
# Prints monitoring/rules/ as PrometheusRule objects, which the Prometheus operator loads.
set -eu
cd "$(dirname "$0")/../../monitoring/rules"
for file in *.yml; do
  printf -- '---\napiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: slipway-%s\nspec:\n' "${file%.yml}"
  sed 's/^/  /' "$file"
done
