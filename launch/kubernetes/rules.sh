#!/bin/sh
# Prints monitoring/rules/ as PrometheusRule objects for the Prometheus operator.
set -eu
cd "$(dirname "$0")/../../monitoring/rules"
for file in *.yml; do
  cat << END
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: slipway-${file%.yml}
spec:
END
  sed 's/^/  /' "$file"
done
