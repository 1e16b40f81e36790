// Pause is the only process of a pod's sandbox: it holds the namespaces until SIGTERM.
// Built by dev/localcluster/binaries.py, made into an image by dev/localcluster/images.py.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGINT, syscall.SIGTERM)
	<-stop
}
