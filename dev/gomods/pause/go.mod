module spottrain.dev/gomods/pause

go 1.24.0
