"""The price CronJob: asks a cloud what instances cost, and writes it to a ConfigMap that the operator reads.

__main__   one run: what to price, ask the cloud, merge, write; its exit code
settings   from the environment
aws        EC2's spot price history and AWS's price list; the only module that knows boto3
azure      Azure's retail prices
rates      what a cloud answered, merged with what was written before. Pure
cluster    the API server: nodes, and one ConfigMap
web        one HTTP request
"""
