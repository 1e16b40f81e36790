//go:build tools

// Keeps the programs of this module in go.mod; built by dev/localcluster/binaries.py.
package main

import (
	_ "sigs.k8s.io/karpenter/kwok"
)
