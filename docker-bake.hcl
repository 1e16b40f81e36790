# `docker buildx bake --push`: the images of a release, for two architectures each.
variable "REGISTRY" { default = "ghcr.io/spottrain" }
variable "VERSION" { default = "dev" }

group "default" {
  targets = ["operator", "runtime", "sync", "prices"]
}

target "image" {
  name      = item
  matrix    = { item = ["operator", "runtime", "sync", "prices"] }
  target    = item
  platforms = ["linux/amd64", "linux/arm64"]
  tags      = ["${REGISTRY}/spottrain-${item}:${VERSION}"]
}
