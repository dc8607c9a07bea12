# ruff: noqa: E501 (tables of patterns and words)
"""The frames of English questions: what is said around the thing that is asked for.

`strip` takes them off, from the outside in, and says what kind of question it was. "could you please tell me how to X",
"what is the best way to X" and "steps to X" are all ("how", X).
"""

from __future__ import annotations

import re

COMMON = frozenset(
    [
        "a",
        "an",
        "the",
        "this",
        "that",
        "these",
        "those",
        "is",
        "are",
        "was",
        "were",
        "am",
        "be",
        "been",
        "being",
        "do",
        "does",
        "did",
        "done",
        "have",
        "has",
        "had",
        "having",
        "will",
        "would",
        "shall",
        "should",
        "can",
        "could",
        "may",
        "might",
        "must",
        "of",
        "to",
        "in",
        "on",
        "at",
        "for",
        "from",
        "with",
        "by",
        "about",
        "into",
        "onto",
        "as",
        "and",
        "or",
        "but",
        "not",
        "no",
        "it",
        "its",
        "i",
        "me",
        "my",
        "mine",
        "we",
        "us",
        "our",
        "you",
        "your",
        "yours",
        "he",
        "she",
        "him",
        "her",
        "his",
        "they",
        "them",
        "their",
        "who",
        "what",
        "which",
        "when",
        "where",
        "why",
        "how",
        "there",
        "here",
        "if",
        "so",
        "than",
        "then",
        "too",
        "very",
        "please",
        "over",
        "under",
        "between",
        "after",
        "before",
        "during",
        "through",
    ]
)

# Function words and words of frames that a slip of the hand is looked up among.
CORRECTED = sorted(
    {word for word in COMMON if len(word) > 3}
    | {
        "please",
        "could",
        "tell",
        "explain",
        "show",
        "describe",
        "know",
        "thanks",
        "best",
        "people",
        "advance",
        "many",
        "much",
        "long",
        "often",
        "does",
        "doing",
        "difference",
    }
)

_PAST = frozenset(["was", "were", "did", "had"])
_FUTURE = frozenset(["will", "shall", "gonna"])

# What may stand before a question or a request, in any number.
_LEAD = re.compile(
    r"^(?:"
    r"(?:hi|hello|hey|hiya|greetings|good (?:morning|afternoon|evening))(?: (?:there|everyone|all|team|guys|folks))?"
    r"|please|kindly|so|ok|okay|um|uh|well|also|and|but|now|just|actually|basically|honestly|alright|right|excuse me|sorry(?: to (?:bother|disturb) you| for (?:bothering|disturbing) you)?"
    r"|(?:a |one |just a |just one |another |i have a |i have one |i 'd have a |i got a )?(?:quick |short |simple |small |dumb |silly )?"
    r"(?:question|query|one)(?: (?:for you|here|about this|about that))?(?= [,.])"
    r"|(?:i am |am |i was |was )?(?:just |very |really )?(?:curious|wondering|asking|interested)(?: (?:to know|in knowing|about|if you could tell me|if you can tell me|if anyone knows|if you know|whether you know))?"
    r"|just (?:curious|wondering|asking)|out of curiosity|for (?:my|your) (?:information|reference)|by the way|btw|fyi"
    r"|i (?:just |really |would |also )*(?:wonder|wondered|ask|(?:want|need|wanted|like|love|wish) to (?:know|find out|understand|learn|ask(?: you)?|hear|be told|figure out|check))(?: (?:about|if you know|exactly))?"
    r"|i (?:am|was) (?:just |really |currently )?(?:trying|looking|hoping) to (?:find out|understand|learn|know|figure out|work out|see)(?: about)?"
    r"|i (?:do not|ca not|can not|could not) (?:know|figure out|find out|remember|understand|work out|recall)"
    r"|i (?:need|want|would like|could use|require) (?:some |a bit of |a little |your )?(?:help|assistance|advice|guidance|info|information|details)(?: (?:with|on|about|regarding|in|to (?:understand|know|figure out)))?"
    r"|(?:can|could|will|would|may|might) (?:you|u|someone|somebody|anyone|anybody|i|we) (?:please |kindly |possibly |perhaps |maybe |just |quickly |briefly |also )*(?:tell me|tell us|let me know|let us know|inform me|remind me|help me (?:understand|figure out|find out|know|with|out with)|help me(?= (?:how|what|why|to))|explain(?: to me| to us)?|clarify(?: for me)?|advise(?: me)?(?: on)?|share|say|know|ask(?: you)?|get (?:some )?(?:help|information|info|details) (?:with|on|about)|give me (?:some )?(?:information|info|details) (?:on|about)|describe(?: to me)?|give (?:me )?an explanation of|show me(?= (?:how|what|why|where)))(?: about)?"
    r"|(?:please )?(?:tell me|tell us|let me know|remind me|help me (?:understand|figure out|find out|know)|help me with|help with|inform me|explain(?: to me| to us)?|clarify|describe(?: to me)?|give me (?:some )?(?:information|info|details) (?:on|about)|show me(?= (?:how|what|why|where)))(?: about)?"
    r"|(?:do|does|would|did) (?:you|u|anyone|anybody|someone|somebody|any of you) (?:happen to |by any chance |perhaps |actually |maybe )?(?:know|have (?:any |an )?idea(?:s)?(?: of| about| on)?|remember)(?: of| about)?"
    r"|(?:have )?(?:you )?(?:got )?any (?:idea|ideas|clue|thoughts|suggestions|advice|tips)(?: (?:on|about|as to|of|for))?(?= (?:how|what|why|when|where|who|which))"
    r"|is it possible to (?:know|tell me|find out)|would it be possible to (?:know|tell me)|mind telling me|would you mind (?:telling me|explaining)|are you able to tell me"
    r"|(?:my |the )question is(?: about)?|here is (?:a|my) question|i have a question (?:about|regarding|on)|asking for a friend"
    r"|what i (?:want|need|would like) to (?:know|ask) is|all i want to know is|the thing i want to know is"
    r"|for me|if you do not mind|if possible|if you can|if i may ask|real quick|quickly|thanks|thank you|in advance|hope you are (?:well|doing well)"
    r"|'s|,|\."
    r")(?= |$) ?"
)
_TAIL = re.compile(
    r" ?(?:^| )(?:please|thanks|thank you|thx|cheers|(?:many thanks|thanks|thank you)(?: so much| very much| a lot)?(?: in advance| for your help)?|in advance|for me|anyone|anybody|someone"
    r"|any (?:ideas|idea|help|advice|suggestions|tips|thoughts)(?: (?:is|would be|are))?(?: appreciated| welcome| helpful)?|help(?: me)?(?: please| out)?|can you help(?: me)?(?: out)?|could you help(?: me)?"
    r"|right now|nowadays|these days|at the moment|currently|at present|presently|as of now|in general|generally|in detail|for my (?:friend|information|reference)"
    r"|(?:can|could|would|will) (?:you|someone|anyone) (?:please )?(?:tell me|let me know|explain(?: it| this)?(?: to me)?|help(?: me)?(?: with (?:this|that|it))?|clarify|advise)"
    r"|do you know|does anyone know|i (?:want|need|would like) to know|i wonder|i am (?:just )?(?:curious|wondering)|just (?:curious|wondering|asking)|out of curiosity"
    r"|by the way|btw|exactly|actually|if i may ask|if you do not mind|if possible|if you can|real quick|by any chance|tell me|let me know|right now please|asap|i forgot|i forget|i do not remember|'s|,|\.)$"
)
_IMPERATIVES = (
    "write|create|generate|make|give|list|show|translate|convert|summarize|summarise|suggest|recommend|find|fix|walk|"
    "teach|provide|compare|calculate|compute|define|name|solve|check|rewrite|draft|outline|guide|help|draw|compose|"
    "design|plan|build|prepare|implement|refactor|debug|review|proofread|edit|correct|shorten|paraphrase|simplify|"
    "identify|describe|explain|tell|point|direct|send|add|sort|format|optimize|optimise|classify|extract|count|work"
)
# A request in the form of a question.
_REQUEST = re.compile(
    rf"^(?:(?:can|could|will|would) (?:you|u) (?:please |kindly |possibly |perhaps |just |quickly )*(?=(?:{_IMPERATIVES}) )"
    rf"|i (?:want|need|would like) you to (?=(?:{_IMPERATIVES}) )|would you mind (?=\w+ing )|help me (?:to )?(?=(?:{_IMPERATIVES}) ))"
)

_SELF = r"(?:i|you|we|one|someone|somebody|people|users?|a person|a user|u)"
_GOOD = r"(?:(?:best|good|right|proper|correct|easiest|easy|simplest|simple|quickest|recommended|usual|preferred|standard|normal|ideal|fastest|exact|possible|general|most common|common) )*"
# (kind, what begins such a question); what follows is what it is about. The first that fits counts.
_KINDS = [
    (kind, re.compile("^(?:" + pattern + r")(?:(?<= )|(?= |$)) ?"))
    for kind, pattern in [
        ("cost", rf"how much (?:money )?(?:do|does|did|would|will|is|are|was|were|should)(?: it cost(?: (?:me|you|us))?(?: to)?| {_SELF} (?:have to |need to )?pay (?:for|to)| {_SELF} cost)?"),
        ("cost", r"(?:what is |what are |what would |what does |whats )?(?:the )?(?:total |current |average )?(?:price|cost|pricing|prices|costs|fee|fees|charge)(?: tag)? (?:of|for|to)"),
        ("cost", r"how (?:expensive|pricey|costly) (?:is|are|would be|was)(?: it to)?|what does it cost to"),
        ("how long", rf"how (?:long|much time) (?:do|does|did|will|would|should)(?: it(?: usually| typically| normally)? take(?: {_SELF}| me)?(?: to| for)?| {_SELF} (?:need|have) to)?|how long (?:is|are|was|can|should|must)|how much time (?:is (?:needed|required) to|is (?:needed|required) for)?|what is the (?:time needed|duration|time required) (?:to|for|of)"),
        ("how many", r"how many|(?:what is |what was )?the (?:total )?(?:number|count|amount) of|number of"),
        ("how much", r"how much"),
        ("difference", r"(?:what is |what are |what 's |is there (?:a|any) |explain |describe )?(?:the |a |some )?(?:main |key |exact |actual |real |major |basic )?(?:difference|differences|distinction|distinctions) between"),
        ("why", r"why (?:is it that|do|does|did|is|are|was|were|can|could|should|would|will|has|have|had)?|how come|for what reason (?:do|does|did|is|are)?|what is the (?:main |real )?(?:reason|cause|explanation) (?:that|for|why|behind|of)(?: the fact that)?|what are the (?:reasons|causes) (?:that|for|why|behind|of)|what (?:causes|caused)|what (?:makes|made)(?: it so that)?|(?:the )?(?:reason|cause|causes|reasons) (?:that|for|why|behind|of)"),
        ("when", r"(?:at |on |in )?(?:what|which) (?:time|date|day|year|month)(?: of (?:day|the day|the year))? (?:is|are|was|were|do|does|did|will|can|should)|when (?:exactly )?(?:is|are|was|were|do|does|did|will|can|should|would|has|have)?|(?:what is |what was )?the (?:exact )?(?:date|year) (?:of|when|that|in which|on which)"),
        ("where", rf"where (?:exactly )?(?:is|are|was|were|do|does|did|will|can|could|should|would|might)?(?: {_SELF}(?= (?!is|are)))?(?: find)?|(?:what is |what was )?the (?:exact )?(?:location|whereabouts) of|(?:in|at) (?:what|which) (?:place|location|part of the world) (?:is|are|was|were|do|does|did|can)"),
        ("who", r"who (?:is|are|was|were) (?:the )?(?:person|people|one|man|woman|guy) (?:who|that)|(?:which|what) (?:person|people|man|woman|individual) (?:is|are|was|were)?|who (?:is it that|was it that|is|are|was|were|do|does|did|will|can|should|has|have)?|(?:what is |what was )?the (?:name|identity) of the (?:person|man|woman|one) (?:who|that)"),
        ("how work", r"how (?:do|does|did|is|are)(?= [^,.]*\b(?:work|works|function|operate|operates)$)|how (?:exactly )?(?=(?!to |do |does |can |should |could |would |is |are |was |were |often |old |far |tall |big |large |deep |fast |high |hot |cold |heavy |good |bad |well |early |late |much |many )[^,.]*\b(?:works|functions|operates)$)|the (?:workings|inner workings|working principle) of|the way (?=[^,.]*\b(?:works|functions|operates)$)"),
        ("how", rf"how (?:exactly )?(?:do|can|could|should|would|might|must|shall|does|did|will) {_SELF} (?:best |possibly |go about |properly |correctly |safely |actually |be able to |be able |usually |normally |proceed to |manage to )*(?:to )?"),
        ("how", r"how (?:best )?to (?:properly |correctly |best |go about |actually )*|how (?:would|do|should) (?:i|you|one|we) go about|how about a way to|how is it possible to"),
        ("how", rf"(?:what is |what are |what was |what would be |what 's |which is |which are |is there |are there |do you have |give me |show me |i need |i want )?(?:the |a |an |any |some )?{_GOOD}(?:way|ways|method|methods|approach|approaches|procedure|procedures|process|processes|steps|step|technique|techniques|instructions|guide|guidelines|tutorial|how-to|manual|directions|strategy)(?: by step(?: guide| instructions)?)?(?: (?:involved|required|needed|necessary))?(?: (?:in which|by which))?(?: (?:i|you|we) (?:can|could|should|need to|have to|must)(?: (?:take|follow|use))?)?(?: to(?: take to)?| for(?: how to)?| of| in order to| on how to| in)(?= (?!the same))"),
        ("how", rf"(?:what|which) (?:steps|step|actions|action|procedure|process|measures|method|things)? ?(?:do|should|must|can|could|would|does|are|is|will) (?:{_SELF} )?(?:need to |have to |supposed to |required to )?(?:take|do|follow|use|be done|done|taken|needed|required)(?: in order)? (?:to|for)"),
        ("how", r"(?:walk|guide|take|talk|lead) me through(?: the (?:process|steps|procedure) (?:of|for|to))?(?: how to)?|(?:teach|show) me (?:how )?to|(?:please )?help me(?: to)?|instruct me (?:on )?how to|(?:step by step |detailed |simple |quick )*(?:instructions|guide|tutorial|steps|directions|tips) (?:for|to|on|about)(?: how to)?|best way to|ways to"),
        ("how", r"i (?:want|would like|wish|need|am trying|was trying|have|hope|am looking|am attempting|intend|plan|would love) to(?: be able to)?"),
        ("can", rf"(?:can|could|may|might) {_SELF} (?:be allowed to |legally )?|is it (?:possible|allowed|ok|okay|permitted|fine|permissible|acceptable|alright|all right)(?: for (?:me|us|you|one|someone))? to|(?:am i|are we|are you|is one) (?:able|allowed|permitted) to|(?:is there|are there) (?:any|a|some) (?:chance|possibility|option) (?:of|to)|does (?:one|anyone) have the right to|do (?:i|we|you) have (?:the right|permission|the option) to"),
        ("should", rf"should {_SELF}|is it (?:advisable|recommended|a good idea|wise|best|worth it)(?: for me)? to|ought {_SELF} to|do you (?:recommend|advise|suggest)|would you (?:recommend|advise|suggest)"),
        ("must", rf"(?:do|does|must) {_SELF} (?:have to|need to|be required to)|must {_SELF}|(?:am i|are we|are you|is one) (?:required|obliged|obligated|forced|supposed) to|is it (?:necessary|required|mandatory|obligatory|compulsory|needed)(?: for (?:me|us|you))? to"),
        ("polar can", r"can|could|may|might"),
        ("polar should", r"should"),
        ("polar will", r"will|would|shall"),
        ("polar must", r"must"),
        ("polar have", r"has|have|had"),
        ("polar is", r"is|are|was|were|am"),
        ("polar do", r"do|does|did"),
        ("how?", r"how (?:do|does|did|is|are|was|were|can|could|should|would|will|has|have)"),
        ("mean", r"(?:what is |what 's |tell me )?(?:the )?(?:meaning|definition|significance) of(?: the (?:word|term|phrase|expression|idiom|acronym))?|what (?:do|does|did)(?= [^,.]*\b(?:mean|means|stand for|stands for|signify|denote|imply)\b)|what is meant by|what is meant when people say|define(?: the (?:word|term|phrase))?"),
        ("what", r"what (?:is|are|was|were|'s)|which (?:is|are|was|were)(?: the)? (?:one|ones) (?:that|which)|which one of|which (?:of (?:the|these) )?|what (?:do|does|did|can|could|should|would|will|has|have|kind of|kinds of|sort of|type of|types of)|what|give me|list|name|show me|show|state|provide|present"),
    ]
]  # fmt: skip
_HOW_ADJECTIVE = re.compile(
    r"^how (often|frequently|old|far|tall|big|large|deep|fast|quickly|high|hot|cold|heavy|good|bad|well|early|late|wide|"
    r"thick|strong|safe|dangerous|hard|difficult|likely|important|accurate|reliable|soon|close|small|low|dark|bright|loud)(?= )"
)
_QUESTION = r"(?:how|what|why|when|where|who|which|whose|is|are|am|was|were|do|does|did|can|could|should|would|will|may|must|has|have)"
_FRONT = re.compile(
    rf"^((?:in|on|for|using|with|when|if|after|before|at|during|from|under|inside|within|as|while|by|given|to) [^,.]{{1,80}}?) , (?=(?:please |tell me |explain |could you |can you |i )?(?:{_QUESTION}|{_IMPERATIVES}|please|tell|explain|i)\b)(.*)$"
)
_FRONT_SHORT = re.compile(rf"^((?:in|on|using|with|for) [^\s,.]+(?: [^\s,.]+){{0,2}}) (?={_QUESTION} )(.*)$")
# Several words that say what one does; after the frame, longest first.
_PHRASES = [
    (re.compile(rf"\b(?:{pattern})\b"), word)
    for pattern, word in [
        (r"gett?(?:ing)? rid of|got rid of", "remove"), (r"sett?(?:ing)? up", "setup"), (r"logg?(?:ing)? in(?:to)?|sign(?:ing)? in(?:to)?", "login"),
        (r"logg?(?:ing)? (?:out|off)|sign(?:ing)? (?:out|off)", "logout"), (r"sign(?:ing)? up", "register"),
        (r"turn(?:ing)? off|switch(?:ing)? off|shutt?(?:ing)? off", "disable"), (r"turn(?:ing)? on|switch(?:ing)? on", "enable"),
        (r"carry(?:ing)? out", "perform"), (r"find(?:ing)? out", "discover"), (r"fill(?:ing)? (?:out|in)", "complete"),
        (r"put(?:ting)? together", "assemble"), (r"throw(?:ing)? (?:away|out)", "discard"), (r"look(?:ing)? for", "search"),
        (r"look(?:ing)? up", "find"), (r"taking care of|take care of|look(?:ing)? after", "care"), (r"a lot of|lots of", "many"),
        (r"in order to", "to"), (r"as well as", "and"), (r"because of|due to|owing to", "because"), (r"a few|several", "some"),
        (r"is able to|are able to|am able to|be able to", "can"), (r"make use of|making use of", "use"), (r"e ?- ?mail", "email"),
        (r"wi ?- ?fi", "wifi"), (r"back ?up", "backup"), (r"whole ?wheat", "wholewheat"), (r"ph ?\. ?d", "phd"),
        (r"united states of america|united states|u ?\. ?s ?\. ?a|u ?\. ?s(?= \.)|usa", "us_country"), (r"united kingdom|great britain|u ?\. ?k", "uk"),
        (r"new york city|nyc", "new york city"), (r"with the help of|by means of|with the use of|by using", "using"),
        (r"is located|are located|is situated|are situated|be found|located|situated", "found"), (r"as soon as possible", "asap"),
        (r"come(?:s)? from", "origin"), (r"get(?:ting)? started with", "start"), (r"start(?:ing)? out with", "start"),
        (r"i have got|i got", "i have"), (r"pay(?:ing)? off", "repay"), (r"giv(?:e|ing) up", "quit"), (r"cut(?:ting)? down on", "reduce"),
        (r"go(?:ing)? up", "rise"), (r"go(?:ing)? down", "fall"), (r"hand(?:ing)? in", "submit"), (r"call(?:ing)? off", "cancel"),
        (r"figure out|work out", "determine"), (r"point(?:ing)? out", "show"), (r"deal(?:ing)? with", "handle"), (r"every day|each day", "daily"),
        (r"every week|each week", "weekly"), (r"every month|each month", "monthly"), (r"every year|each year", "yearly"),
        (r"per (?:day)", "daily"), (r"per week", "weekly"), (r"per month", "monthly"), (r"per year|per annum", "yearly"),
    ]
]  # fmt: skip


_MEASURES = {
    "tall": "height", "high": "height", "old": "age", "far": "distance", "deep": "depth", "heavy": "weight", "wide": "width",
    "big": "size", "large": "size", "thick": "thickness", "often": "frequency", "frequently": "frequency", "fast": "speed",
    "hot": "temperature",
}  # fmt: skip
_PARTICIPLE = r"(\w+(?:ed|en|wn|one|ade|ept|ent|old|ught|elt|uilt|ut|et|ung|un|orn|ead))"
_HOW_IT = r"how(?: to(?: do (?:it|that|this))?| (?:do|can|should|could|would) (?:i|you|one|we) (?:do|fix|achieve|go about) (?:it|that|this)| (?:does|would|do) (?:it|that|this) work| (?:is|can|should) (?:it|that|this) (?:be )?done| do i)?"
_WHY_IT = r"why(?: is (?:that|it|this)| did (?:that|it|this) happen| does (?:that|it|this) happen| so)?"
# Other orders of the same question: (pattern, kind, what is left).
_TURNED = [
    (re.compile(pattern), kind, rest)
    for pattern, kind, rest in [
        (rf"^(.+?) [,.] {_HOW_IT}$", "how", r"\1"),
        (rf"^(.+?) [,.] {_WHY_IT}$", "why", r"\1"),
        (rf"^how (?:can|could|should|may|might|would|must) (.+?) (?:best |properly |safely )?be {_PARTICIPLE}( .+)?$", "how", r"\2 \1\3"),
        (rf"^how (?:is|are) (.+?) (?:best |usually |normally |typically |properly )?{_PARTICIPLE}( .+)?$", "how", r"\2 \1\3"),
        (rf"^(?:can|may|could) (.+?) be {_PARTICIPLE}( .+)?$", "can", r"\2 \1\3"),
        (r"^(.+?) (?:vs|versus)(?: \.)? (.+?)(?: [,.] (?:what is )?(?:the )?(?:main |key )?differences?)?$", "difference", r"\1 \2"),
        (r"^how (?:do|does|are|is) (.+?) (?:and|from|to) (.+?) (?:differ|different|differs)$", "difference", r"\1 \2"),
        (r"^how (?:do|does|is|are) (.+?) (?:differ|differs|different) (?:from|to) (.+)$", "difference", r"\1 \2"),
        (r"^(?:in )?what (?:ways? )?(?:distinguishes|separates) (.+?) (?:and|from) (.+)$", "difference", r"\1 \2"),
        (r"^who (?:is|was|are|were) (?:the )?(?:author|writer) of (.+)$", "who", r"wrote \1"),
        (r"^(?:which|what) (?:author|writer) (wrote .+)$", "who", r"\1"),
        (r"^who (?:is|was) (?:the )?inventor of (.+)$", "who", r"invented \1"),
        (r"^who (?:is|was) (?:the )?discoverer of (.+)$", "who", r"discovered \1"),
        (rf"^(?:by whom|by who) (?:is|was|were|are) (.+?) {_PARTICIPLE}( .+)?$", "who", r"\2 \1\3"),
        (rf"^(.+?) (?:is|was|were) {_PARTICIPLE} by whom$", "who", r"\2 \1"),
        (r"^(?:convert|change|turn|express) (.+?) (?:to|into|in) (.+)$", "what", r"\1 in \2"),
        (r"^(?:what is|what are|how much is|how much are) (-?\d.*?) (?:in|to|into) (.+)$", "what", r"\1 in \2"),
        (r"^(-?\d.*?) (?:to|into) (\w+)$", "what", r"\1 in \2"),
        (r"^how many (.+?) (?:are|is) (?:there )?(?:in )?(-?\d.*)$", "what", r"\2 in \1"),
        (r"^(-?\d.*?) (?:is|are|equals) how many (.+)$", "what", r"\1 in \2"),
        (r"^(?:calculate|compute|work out|determine|name) (.+)$", "what", r"\1"),
        (r"^how much is (.*(?:\d|percent|root|sum|product).*)$", "what", r"\1"),
        (r"^(?:which|what) city is (?:the )?capital (?:city )?of (.+)$", "what", r"\1 capital"),
        (r"^(?:what is |what 's )?(?:the )?(.+?) (?:'s )?capital city$", "what", r"\1 capital"),
        (r"^(?:what is |what 's )?(?:the )?capital city of (.+)$", "what", r"\1 capital"),
        (r"^what is (.+?) (?:'s )?(?:date of birth|birth date|birthdate|birthday)$", "when", r"\1 born"),
        (r"^(?:what is )?(?:the )?(?:date of birth|birth date|birthdate|birthday) of (.+)$", "when", r"\1 born"),
        (r"^how many (?:people|inhabitants|residents|persons) (?:live|are living|are there) in (.+)$", "what", r"population of \1"),
        (r"^how (?:big|large) is the population of (.+)$", "what", r"population of \1"),
    ]
]  # fmt: skip


def strip(text: str) -> tuple[str, str, str]:
    """Of a question in lower case, its tokens apart: its kind, "" when it has no frame known here; what is left of it
    then; and the whole question without what was said before and after it."""
    original = text.strip()
    text = peeled = _peel(text)
    for pattern, word in _PHRASES:
        text = pattern.sub(word, text)
    for pattern, kind, rest in _TURNED:
        found = pattern.match(text)
        if found:
            return kind, _peel(found.expand(rest)), peeled
    front = _FRONT.match(text) or _FRONT_SHORT.match(text)
    if front:
        text = _peel(f"{front[2]} {front[1]}")
        for pattern, kind, rest in _TURNED:
            found = pattern.match(text)
            if found:
                return kind, found.expand(rest), peeled
    how = _HOW_ADJECTIVE.match(text)
    if how:
        rest = text[how.end() :].strip()
        measure = _MEASURES.get(how[1])
        if measure and rest.split(" ")[0] in ("is", "are", "was", "were") and how[1] not in ("often", "frequently"):
            return "what", f"the {measure} of {rest}", peeled
        return f"how {how[1].replace('frequently', 'often')}", rest, peeled
    for kind, begins in _KINDS:
        found = begins.match(text)
        if found:
            rest = text[found.end() :].strip()
            return kind, _LAST[kind].sub("", rest) if kind in _LAST else rest, peeled
    # "Tell me the capital of France" names what it wants to know.
    return "what" if _ASKED.search(original) and peeled != original else "", text, peeled


_ASKED = re.compile(r"\b(?:tell me|tell us|let me know|remind me|explain|describe|want to know|like to know|clarify)\b")
# What may end a question of a kind without adding to it.
_LAST = {
    kind: re.compile(rf" (?:{words})$")
    for kind, words in {
        "cost": "costs?",
        "how long": "last|lasts|take|takes|be|for",
        "mean": "mean|means|stand for|stands for|signify|denote",
        "how work": "works?|functions?|operates?",
        "where": "found|be|at",
        "when": "happen|take place|occur|be",
        "why": "happen|occur",
        "how": "be done",
    }.items()
}


def _peel(text: str) -> str:
    """Without what is before and after the question."""
    text = text.strip()
    for _ in range(12):
        shorter = _REQUEST.sub("", _LEAD.sub("", text))
        tail = _TAIL.sub("", shorter)
        shorter = tail.strip() or shorter.strip()
        if not shorter or shorter == text:
            break
        text = shorter
    return text


def courtesy(text: str) -> bool:
    """Whether a sentence has nothing but what may be said before or after a question."""
    ended = _TAIL.sub("", text.strip())
    while ended and ended != text:
        text, ended = ended, _TAIL.sub("", ended).strip()
    text = _peel(ended)
    return not _LEAD.sub("", text).strip() or not _TAIL.sub("", text).strip()


def tense(raw: list[str]) -> str:
    """ "past", "future" or "" by the auxiliaries alone."""
    if not _PAST.isdisjoint(raw):
        return "past"
    return "" if _FUTURE.isdisjoint(raw) else "future"
