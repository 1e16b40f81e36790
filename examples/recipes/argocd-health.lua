local status = obj.status or {}
if status.observedGeneration ~= obj.metadata.generation then
  return {status = "Progressing", message = "the operator has not seen this spec yet"}
end
local found = {}
for _, condition in ipairs(status.conditions or {}) do found[condition.type] = condition end
local function says(type, value) return found[type] ~= nil and found[type].status == value end
if says("Failed", "True") then return {status = "Degraded", message = found.Failed.message} end
if says("Succeeded", "True") then return {status = "Healthy", message = found.Succeeded.message} end
if says("Accepted", "False") then return {status = "Degraded", message = found.Accepted.message} end
if says("Suspended", "True") then return {status = "Suspended", message = found.Suspended.message} end
local now = says("Scheduled", "False") and found.Scheduled or found.Running
return {status = "Progressing", message = now and now.message or "no attempt yet"}
