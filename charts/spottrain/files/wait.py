"""Waits until a TrainingJob has Succeeded: python3 -c THIS NAMESPACE NAME SECONDS. Used by `helm test`."""

import json
import os
import ssl
import sys
import time
import urllib.request

ACCOUNT = os.environ.get("SPOTTRAIN_SERVICE_ACCOUNT") or "/var/run/secrets/kubernetes.io/serviceaccount"


def get(path):
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    address = f"[{host}]" if ":" in host else host
    with open(f"{ACCOUNT}/token") as token:
        headers = {"Authorization": f"Bearer {token.read().strip()}", "Accept": "application/json"}
    request = urllib.request.Request(f"https://{address}:{port}{path}", headers=headers)
    tls = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    with urllib.request.urlopen(request, timeout=10, context=tls) as reply:
        return json.load(reply)


def main(namespace, name, seconds):
    end, last = time.monotonic() + float(seconds), "no answer yet"
    while time.monotonic() < end:
        try:
            status = (
                get(f"/apis/spottrain.io/v1alpha1/namespaces/{namespace}/trainingjobs/{name}").get("status")
                or {}
            )
        except (OSError, ValueError) as error:
            last = f"the API server does not answer: {error}"
        else:
            conditions = status.get("conditions", ())
            states = {c["type"]: c["status"] for c in conditions}
            last = "\n".join(
                f"{c['type']}={c['status']} {c.get('reason', '')}: {c.get('message', '')}" for c in conditions
            )
            last = last or "It has no status: does the operator run, and is the namespace in watchNamespaces?"
            if states.get("Succeeded") == "True":
                print(f"TrainingJob {namespace}/{name} has Succeeded")
                return 0
            if states.get("Failed") == "True":
                break
        time.sleep(1)
    print(f"TrainingJob {namespace}/{name} has not Succeeded\n{last}", file=sys.stderr)
    return 1


sys.exit(main(*sys.argv[1:]))
