// The process that holds a pod's namespaces: waits until it is told to end. Reaps nothing, since pods here share no pid namespace.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGINT, syscall.SIGTERM)
	<-ended
}
