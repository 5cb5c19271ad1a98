#!/usr/bin/env bash
# The engine that decodes: ./decode.sh MODEL
exec vllm serve "${1:?which model}" --port 8200 --kv-transfer-config '{
  "kv_connector": "AsyncKVConnector",
  "kv_connector_module_path": "asynckv.integrations.vllm",
  "kv_role": "kv_consumer",
  "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"peers": ["tcp://127.0.0.1:14579"]}
}' "${@:2}"
