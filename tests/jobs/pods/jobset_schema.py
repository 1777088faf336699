"""JobSet v1alpha2 as a strict JSON schema: its fields as the published API has them, and none besides.

Written from `api/jobset/v1alpha2` of kubernetes-sigs/jobset. What a child Job has inside is checked as a Job by the
schemas of Kubernetes; `checked_jobset` does both, and says what a cluster's webhook would besides.
"""

from __future__ import annotations

import functools
from typing import Any

import jsonschema
import kubernetes_validate
from kubernetes_validate import utils

for _name in ("all_versions", "schema_contents"):  # read anew for each object otherwise, megabytes of it
    setattr(utils, _name, functools.cache(getattr(utils, _name)))

KUBERNETES = ("1.29", "1.33", "1.37")
"""From the first that has failures for each index to today's."""

LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
NAMES = {"type": "array", "items": {"type": "string"}}
COUNT = {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}


def closed(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has these fields only."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


METADATA = closed(
    name=LABEL,
    namespace=LABEL,
    labels=STRINGS,
    annotations=STRINGS,
    uid={"type": "string"},
    resourceVersion={"type": "string"},
    creationTimestamp={"type": ["string", "null"]},
    ownerReferences={"type": "array"},
    finalizers=NAMES,
)
RULE = closed(
    ("action",),
    name={"type": "string", "maxLength": 128, "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons={
        "type": "array",
        "items": {
            "enum": [
                *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"),
                "PodFailurePolicy",
            ]
        },
    },
    onJobFailureMessagePatterns=NAMES,
    targetReplicatedJobs=NAMES,
)
REPLICATED_JOB = closed(
    ("name", "template"),
    name=LABEL,
    groupName=LABEL,
    template=closed(("spec",), metadata=METADATA, spec={"type": "object"}),
    replicas=COUNT,
    dependsOn={
        "type": "array",
        "items": closed(("name", "status"), name=LABEL, status={"enum": ["Ready", "Complete"]}),
    },
)
JOBSET = closed(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata={**METADATA, "required": ["name"]},
    spec=closed(
        replicatedJobs={"type": "array", "items": REPLICATED_JOB},
        network=closed(
            enableDNSHostnames={"type": "boolean"}, subdomain=LABEL, publishNotReadyAddresses={"type": "boolean"}
        ),
        successPolicy=closed(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=NAMES),
        failurePolicy=closed(
            maxRestarts=COUNT,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
            rules={"type": "array", "items": RULE},
        ),
        startupPolicy=closed(("startupPolicyOrder",), startupPolicyOrder={"enum": ["AnyOrder", "InOrder"]}),
        suspend={"type": "boolean"},
        coordinator=closed(("replicatedJob",), replicatedJob=LABEL, jobIndex=COUNT, podIndex=COUNT),
        managedBy={"type": "string", "maxLength": 63},
        ttlSecondsAfterFinished=COUNT,
    ),
)


def check_manifest(manifest: dict[str, Any], version: str = KUBERNETES[-1]) -> None:
    """Check one object as an API server would, with the schemas of a version of Kubernetes; unknown fields are errors.

    Raises:
        jsonschema.ValidationError, kubernetes_validate.ValidationError: It is not what the schema says.
    """
    if manifest["kind"] != "JobSet":
        kubernetes_validate.validate(manifest, version, strict=True)
        return
    jsonschema.Draft202012Validator(JOBSET).validate(manifest)
    for replicated in manifest["spec"]["replicatedJobs"]:
        template = replicated["template"]
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": template.get("metadata", {}),
            "spec": template["spec"],
        }
        kubernetes_validate.validate(job, version, strict=True)
        last = replicated["template"]["spec"].get("completions", 1) - 1
        pod = f"{manifest['metadata']['name']}-{replicated['name']}-0-{last}-abcde"
        if len(pod) > 63:
            raise jsonschema.ValidationError(f"the name of a pod has 63 characters at most, got {pod}")
