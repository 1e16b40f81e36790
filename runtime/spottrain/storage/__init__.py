"""Object stores behind one protocol (`base`): S3, Google Cloud Storage, folders; and handling of outages."""
