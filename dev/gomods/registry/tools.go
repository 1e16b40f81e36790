//go:build tools

// Package tools keeps the programs of this module in go.mod; built by dev/localcluster/binaries.py.
package tools

import (
	_ "github.com/distribution/distribution/v3/cmd/registry"
)
