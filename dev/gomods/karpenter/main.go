// Prints the CustomResourceDefinitions of the Karpenter that this module pins, its kwok provider's too, as YAML.
// Built and run by dev/localcluster; Karpenter itself (tools.go) brings none.
package main

import (
	"bytes"
	"os"

	kwok "sigs.k8s.io/karpenter/kwok/apis"
	karpenter "sigs.k8s.io/karpenter/pkg/apis"
)

func main() {
	crds := [][]byte{
		karpenter.NodePoolCRD,
		karpenter.NodeClaimCRD,
		karpenter.NodeOverlayCRD,
		karpenter.CapacityBufferCRD,
		kwok.KWOKNodeClassCRD,
	}
	if _, err := os.Stdout.Write(bytes.Join(crds, []byte("\n---\n"))); err != nil {
		os.Exit(1)
	}
}
