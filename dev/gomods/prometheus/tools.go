//go:build tools

// Package tools keeps the programs of this module in go.mod; built by dev/localcluster/binaries.py.
package tools

import (
	_ "github.com/prometheus/prometheus/cmd/prometheus"
	_ "github.com/prometheus/prometheus/cmd/promtool"
)
