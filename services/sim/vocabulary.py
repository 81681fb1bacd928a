"""The words of the simulated model: each is one token.

The order is part of the token ids, so words are only ever added at the end.
"""

from __future__ import annotations

WORDS = tuple(
    """
the of and to in is that it was for on are with as his they be at one have this from or had by hot
but some what there we can out other were all your when up use word how said an each she which do
their time if will way about many then them would write like so these her long make thing see him
two has look more day could go come did my sound no most number who over know water than call
first people may down side been now find any new work part take get place made live where after
back little only round man year came show every good me give our under name very through just form
much great think say help low line before turn cause same mean differ move right boy old too does
tell sentence set three want air well also play small end put home read hand port large spell add
even land here must big high such follow act why ask men change went light kind off need house
picture try us again animal point mother world near build self earth father head stand own page
should country found answer school grow study still learn plant cover food sun four thought let
keep eye never last door between city tree cross since hard start might story saw far sea draw
left late run while press close night real life few stop open seem together next white children
begin got walk example ease paper often always music those both mark book letter until mile river
car feet care second group carry took rain eat room friend began idea fish mountain north once
base hear horse cut sure watch color face wood main enough plain girl usual young ready above ever
red list though feel talk bird soon body dog family direct pose leave song measure state product
black short numeral class wind question happen complete ship area half rock order fire south
problem piece told knew pass farm top whole king size heard best hour better true during hundred
am remember step early hold west ground interest reach fast five sing listen six table travel less
morning ten simple several vowel toward war lay against pattern slow center love person money
serve appear road map science rule govern pull cold notice voice fall power town fine certain fly
unit lead cry dark machine note wait plan figure star box noun field rest correct able pound done
beauty drive stood contain front teach week final gave green quick develop sleep warm free minute
strong special mind behind clear tail produce fact street inch lot nothing course stay wheel full
force blue object decide surface deep moon island foot yet busy test record boat common gold
possible plane age dry wonder laugh thousand ago ran check game shape yes miss brought heat snow
bed bring sit perhaps fill east weight language among model system data user code token cache
memory server client message context network request response value error key file function type
string array integer return default option result input output process thread task queue block
store query index column row event stream batch layer vector matrix tensor gradient loss train
infer prompt prefix suffix decode encode prefill attention sequence length window latency
throughput bandwidth transfer node cluster worker router engine service replica tenant lease
handle conversation session history summary document paragraph section chapter topic reason
explain describe compare define suggest improve fix review debug deploy monitor analyze design
rewrite translate classify extract generate continue because however therefore although instead
without within across around along beyond inside outside upon per
""".split()
)
"""Common words, and those that prompts about software are full of."""

FOREIGN = (
    "naïve",
    "café",
    "über",
    "señor",
    "你好",
    "世界",
    "привет",
    "мир",
    "שלום",
    "👍",
    "🎉",
    "—",
)
"""Words of more than one byte per character, so that answers hold some."""

MARKS = (",", ".", "!", "?", ":", ";")
"""Punctuation that answers hold."""
