package penstock

import (
	"fmt"

	"google.golang.org/protobuf/types/known/structpb"

	penstockv1 "penstock/v1"
)

// Observation is what the policy sees: Text, Tokens or Messages.
type Observation interface {
	observe(chat bool) (prompt, error)
}

// prompt is an observation for the wire's oneofs; exactly one field is set.
type prompt struct {
	text         *string
	tokens       *penstockv1.TokenSequence
	conversation *penstockv1.Conversation
}

// Text is encoded without a chat template; in a conversation it is a user's message.
type Text string

// Tokens are used without change.
type Tokens []int32

// Messages are rendered with the chat template.
type Messages []Message

// Message is one chat message; its Role is "system", "user", "assistant" or "tool".
type Message struct {
	Role      string
	Content   string
	ToolCalls []ToolCall
	// Id of the call that a tool's message answers.
	ToolCallID string
	Reasoning  string
}

// ToolCall is a call that the policy made. ArgumentsJSON is exactly what it wrote, and may be invalid.
type ToolCall struct {
	ToolCallID    string
	Name          string
	ArgumentsJSON string
}

// Tool is a function that the policy may call; Parameters is a JSON Schema.
type Tool struct {
	Name        string
	Description string
	Parameters  map[string]any
}

var roles = map[string]penstockv1.Role{
	"system": penstockv1.Role_ROLE_SYSTEM, "user": penstockv1.Role_ROLE_USER,
	"assistant": penstockv1.Role_ROLE_ASSISTANT, "tool": penstockv1.Role_ROLE_TOOL,
}

func (t Text) observe(chat bool) (prompt, error) {
	if chat {
		return Messages{{Role: "user", Content: string(t)}}.observe(true)
	}
	text := string(t)
	return prompt{text: &text}, nil
}

func (t Tokens) observe(bool) (prompt, error) {
	return prompt{tokens: &penstockv1.TokenSequence{TokenIds: t}}, nil
}

func (m Messages) observe(bool) (prompt, error) {
	conversation := &penstockv1.Conversation{}
	for _, message := range m {
		role, known := roles[message.Role]
		if !known {
			return prompt{}, fmt.Errorf("a role is system, user, assistant or tool, not %q", message.Role)
		}
		written := &penstockv1.ChatMessage{
			Role: role, Content: message.Content, ToolCallId: message.ToolCallID, Reasoning: message.Reasoning,
		}
		for _, call := range message.ToolCalls {
			written.ToolCalls = append(written.ToolCalls, &penstockv1.ToolCall{
				ToolCallId: call.ToolCallID, Name: call.Name, ArgumentsJson: call.ArgumentsJSON,
			})
		}
		conversation.Messages = append(conversation.Messages, written)
	}
	return prompt{conversation: conversation}, nil
}

// writePrompt accepts a nil shown. Tools alone make a conversation whose messages come from the task.
func writePrompt(shown Observation, tools []Tool, chat bool) (prompt, error) {
	if shown == nil && len(tools) == 0 {
		return prompt{}, nil
	}
	if shown == nil {
		shown = Messages{}
	}
	written, err := shown.observe(chat || len(tools) > 0)
	if err != nil || len(tools) == 0 {
		return written, err
	}
	if written.conversation == nil {
		return written, fmt.Errorf("tools go with messages, not with tokens")
	}
	for _, tool := range tools {
		parameters, err := structpb.NewStruct(tool.Parameters)
		if err != nil {
			return written, err
		}
		written.conversation.Tools = append(written.conversation.Tools, &penstockv1.Tool{
			Name: tool.Name, Description: tool.Description, Parameters: parameters,
		})
	}
	return written, nil
}

func readMessage(message *penstockv1.ChatMessage) *Message {
	if message == nil {
		return nil
	}
	read := &Message{Content: message.Content, ToolCallID: message.ToolCallId, Reasoning: message.Reasoning}
	for name, role := range roles {
		if role == message.Role {
			read.Role = name
		}
	}
	for _, call := range message.ToolCalls {
		read.ToolCalls = append(read.ToolCalls, ToolCall{call.ToolCallId, call.Name, call.ArgumentsJson})
	}
	return read
}

// Task is a task, to be attempted several times.
type Task struct {
	// Chosen by the submitter, unique in the run; makes submission idempotent.
	TaskID string
	// The initial prompt; if nil, the agent builds it.
	Prompt Observation
	// Tools that the policy may call; only with messages.
	Tools []Tool
	// JSON values for the agent and for scoring.
	Metadata map[string]any
	// Number of trajectories to sample, which form one group; zero means one.
	GroupSize int
	// Measures one weight version; its groups are not trained on.
	Eval       bool
	DataSource string
	// Position in the data.
	Index int64
	// Sampling options for what the agent's own call does not set.
	Sampling []TurnOption
	sampling *penstockv1.SamplingParams
}

func writeTask(task Task) (*penstockv1.Task, error) {
	shown, err := writePrompt(task.Prompt, task.Tools, false)
	if err != nil {
		return nil, err
	}
	metadata, err := structpb.NewStruct(task.Metadata)
	if err != nil {
		return nil, err
	}
	written := &penstockv1.Task{
		TaskId: task.TaskID, Purpose: purpose(task.Eval), GroupSize: int32(max(task.GroupSize, 1)),
		Metadata: metadata, DataSource: task.DataSource, Index: task.Index,
		SamplingParams: sampled(nil, task.Sampling).sampling,
	}
	switch {
	case shown.text != nil:
		written.Prompt = &penstockv1.Task_Text{Text: *shown.text}
	case shown.tokens != nil:
		written.Prompt = &penstockv1.Task_Tokens{Tokens: shown.tokens}
	case shown.conversation != nil:
		written.Prompt = &penstockv1.Task_Conversation{Conversation: shown.conversation}
	}
	return written, nil
}

func purpose(eval bool) penstockv1.Purpose {
	if eval {
		return penstockv1.Purpose_PURPOSE_EVAL
	}
	return penstockv1.Purpose_PURPOSE_TRAIN
}

func readTask(task *penstockv1.Task) *Task {
	read := &Task{
		TaskID: task.GetTaskId(), Metadata: task.GetMetadata().AsMap(), GroupSize: int(task.GetGroupSize()),
		Eval:       task.GetPurpose() == penstockv1.Purpose_PURPOSE_EVAL,
		DataSource: task.GetDataSource(), Index: task.GetIndex(), sampling: task.GetSamplingParams(),
	}
	switch shown := task.GetPrompt().(type) {
	case *penstockv1.Task_Text:
		read.Prompt = Text(shown.Text)
	case *penstockv1.Task_Tokens:
		read.Prompt = Tokens(shown.Tokens.GetTokenIds())
	case *penstockv1.Task_Conversation:
		messages := Messages{}
		for _, message := range shown.Conversation.GetMessages() {
			messages = append(messages, *readMessage(message))
		}
		read.Prompt = messages
		for _, tool := range shown.Conversation.GetTools() {
			read.Tools = append(read.Tools, Tool{tool.Name, tool.Description, tool.Parameters.AsMap()})
		}
	}
	return read
}
