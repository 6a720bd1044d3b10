"""`/v1/files` and `/v1/batches`: a batch is a bulk run that the endpoint starts."""
