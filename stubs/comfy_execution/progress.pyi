from .graph import DynamicPrompt

class ProgressRegistry:
    prompt_id: str
    dynprompt: DynamicPrompt

def get_progress_state() -> ProgressRegistry: ...
